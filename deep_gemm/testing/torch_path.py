"""The layer as trainers run it without our kernels: sort by expert, all-to-all, torch._grouped_mm, all-to-all back, weighted sum.

It is the competitor of the benchmarks and the yardstick of the accuracy tests: every intermediate is rounded to the dtype of x, as eager
BF16 training does, and gradients come from autograd. Like its models it reads the split sizes on the host when there is more than one rank.
Rows move by gathers and unique scatters in both directions (no atomics), and `compiled=True` fuses the pointwise parts with torch.compile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from deep_gemm.activation import SwiGLU

_ALIGNMENT = 16  # rows; trainers pad every group so that torch._grouped_mm may take it as a contraction in the weight gradient
PLAIN_SWIGLU = SwiGLU()


class _Plan(NamedTuple):
    """Where rows go. Sent row i is entry `entries[i]` (entry = t*K + k); received row j is row `padded_row[j]` of the padded expert order."""

    entries: torch.Tensor
    padded_row: torch.Tensor
    group_ends: torch.Tensor  # [E_l] int32
    num_padded_rows: int
    send_splits: list[int] | None  # None: one rank
    receive_splits: list[int] | None


def _all_to_all(
    rows: torch.Tensor, receive_splits: list[int] | None, send_splits: list[int] | None, group: dist.ProcessGroup
) -> torch.Tensor:
    num_received = rows.shape[0] if receive_splits is None else sum(receive_splits)
    received = rows.new_empty((num_received, *rows.shape[1:]))
    # As bytes: gloo has no bfloat16.
    dist.all_to_all_single(received.view(torch.uint8), rows.contiguous().view(torch.uint8), receive_splits, send_splits, group=group)
    return received


def _make_plan(topk_idx: torch.Tensor, num_local_experts: int, group: dist.ProcessGroup | None) -> _Plan:
    num_ranks = 1 if group is None else group.size()
    num_experts = num_ranks * num_local_experts
    flat = topk_idx.reshape(-1).long()
    keys = torch.where(flat < 0, num_experts, flat)  # entries without an expert sort last
    entries = torch.argsort(keys, stable=True)
    counts = torch.bincount(keys, minlength=num_experts + 1)
    sent, num_rows, splits = counts[:num_experts], flat.numel(), (None, None)
    if group is None:
        received = sent
    else:
        received = _all_to_all(sent, None, None, group)
        splits = torch.stack([sent.view(num_ranks, -1).sum(1), received.view(num_ranks, -1).sum(1)]).tolist()
        entries, num_rows = entries[: sum(splits[0])], sum(splits[1])
    per_source = received.view(num_ranks, num_local_experts)
    aligned = (per_source.sum(0) + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    ends = aligned.cumsum(0)
    # Received rows come as (source, expert) blocks; block (s, e) belongs behind those of earlier sources in the segment of e.
    begins = (ends - aligned) + per_source.cumsum(0) - per_source
    shift = begins.reshape(-1) - (received.cumsum(0) - received)
    if group is None:
        # Nobody has read how many entries have no expert: they become one more block, behind the last group, whose rows are not computed.
        received, shift = counts, F.pad(shift, (0, 1), value=_ALIGNMENT * num_local_experts)
    rows = torch.arange(num_rows, device=flat.device)
    padded_row = rows + shift.repeat_interleave(received, output_size=num_rows)
    return _Plan(entries, padded_row, ends.to(torch.int32), num_rows + _ALIGNMENT * num_local_experts, *splits)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of their experts; the gradient goes the same way back."""

    @staticmethod
    def forward(ctx, rows, receive_splits, send_splits, group):
        ctx.route = (receive_splits, send_splits, group)
        return _all_to_all(rows, receive_splits, send_splits, group)

    @staticmethod
    def backward(ctx, grad):
        receive_splits, send_splits, group = ctx.route
        return _all_to_all(grad, send_splits, receive_splits, group), None, None, None


class _Scatter(torch.autograd.Function):
    """out[index[i]] = rows[i] in `size` rows, zeros elsewhere; `index` has no value twice."""

    @staticmethod
    def forward(ctx, rows, index, size):
        ctx.save_for_backward(index)
        return rows.new_zeros((size, rows.shape[1])).index_copy_(0, index, rows)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    """rows[index]; `index` has no value twice, which spares autograd's own index_select the atomics of its backward."""

    @staticmethod
    def forward(ctx, rows, index):
        ctx.save_for_backward(index)
        ctx.size = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros((ctx.size, grad.shape[1])).index_copy_(0, ctx.saved_tensors[0], grad), None


class _Expand(torch.autograd.Function):
    """Row of the token of each sent entry; backward sums the K rows of a token, in slot order. valid [T, K]: entries with an expert."""

    @staticmethod
    def forward(ctx, x, entries, valid, sum_valid):
        ctx.save_for_backward(entries, valid)
        ctx.sum_valid = sum_valid
        return x.index_select(0, entries // valid.shape[1])

    @staticmethod
    def backward(ctx, grad):
        entries, valid = ctx.saved_tensors
        make = grad.new_empty if entries.numel() == valid.numel() else grad.new_zeros
        slots = make((valid.numel(), grad.shape[1])).index_copy_(0, entries, grad)
        return ctx.sum_valid(slots.view(*valid.shape, grad.shape[1]), valid), None, None, None


def _sum_valid(slots: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return torch.where(valid.unsqueeze(2), slots, 0).sum(1)


def _weighted_sum(slots: torch.Tensor, topk_weights: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Rows weighted in FP32 and rounded, then summed: what trainers do that apply the score after the experts."""
    # Both factors are masked: where there is no expert the row is unwritten memory and the weight anything, and 0 * NaN is NaN in backward.
    rows = torch.where(valid.unsqueeze(2), slots, 0).float()
    weights = torch.where(valid, topk_weights, 0).float().unsqueeze(2)
    return (rows * weights).to(slots.dtype).sum(1)


def _activate(gate: torch.Tensor, up: torch.Tensor, act: SwiGLU) -> torch.Tensor:
    if act.clamp != float("inf"):
        gate, up = gate.clamp(max=act.clamp), up.clamp(-act.clamp, act.clamp)
    if act == PLAIN_SWIGLU:
        return F.silu(gate) * up
    return gate * torch.sigmoid(act.alpha * gate) * (up + act.up_offset)


@functools.cache
def _pointwise(compiled: bool):
    parts = (_activate, _weighted_sum, _sum_valid)
    return tuple(torch.compile(part, dynamic=False) for part in parts) if compiled else parts


def torch_moe(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    w2: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    activation: SwiGLU = PLAIN_SWIGLU,
    compiled: bool = False,
) -> torch.Tensor:
    """y [T, H] of x [T, H], differentiable in x, topk_weights, w13, w2.

    x             [T, H] BF16 (FP32 on CPU too); H and I multiples of 8
    topk_idx      [T, K] int32 or int64, -1 = no expert
    topk_weights  [T, K] FP32
    w13           [E_l, 2I, H] gate rows then up rows, or a (gate, up) pair of [E_l, I, H]; w2 [E_l, H, I]
    group         None = one rank, all experts local; else a group with all_to_all on the tensors' device: collective, forward and backward
    compiled      fuse the pointwise parts with torch.compile (the faster variant; compiles at the first call of a shape)
    """
    activate, weighted_sum, sum_valid = _pointwise(compiled)
    valid = topk_idx >= 0
    plan = _make_plan(topk_idx, w2.shape[0], group)
    rows = _Expand.apply(x, plan.entries, valid, sum_valid)
    if group is not None:
        rows = _Exchange.apply(rows, plan.receive_splits, plan.send_splits, group)
    rows = _Scatter.apply(rows, plan.padded_row, plan.num_padded_rows)
    if isinstance(w13, torch.Tensor):
        gate, up = torch._grouped_mm(rows, w13.transpose(1, 2), offs=plan.group_ends).chunk(2, -1)
    else:
        gate, up = (torch._grouped_mm(rows, w.transpose(1, 2), offs=plan.group_ends) for w in w13)
    rows = torch._grouped_mm(activate(gate, up, activation), w2.transpose(1, 2), offs=plan.group_ends)
    rows = _Gather.apply(rows, plan.padded_row)
    if group is not None:
        rows = _Exchange.apply(rows, plan.send_splits, plan.receive_splits, group)
    slots = _Scatter.apply(rows, plan.entries, valid.numel())
    return weighted_sum(slots.view(*valid.shape, x.shape[1]), topk_weights, valid)
