"""The oracle of Mega MoE: forward and closed-form backward in plain PyTorch, FP32 or FP64 inside, any device, one rank or many.

    y[t] = sum_k topk_weights[t,k] * (W2[e] . swiglu(W13[e] . x[t] + b13[e]) + b2[e]),   e = topk_idx[t,k], nothing where e = -1

On CUDA torch's own setting decides whether FP32 matmuls may be TF32 (torch.backends.cuda.matmul.allow_tf32, off by default): a truth to
measure others by wants it off, or dtype=torch.float64. `forward` and `backward` are the whole layer; `Call` has the steps that the reference backend runs apart.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from ..activation import SwiGLU
from . import experts as rows_of
from .exchange import Exchange
from .experts import Experts
from .precision import resolve_precision

PLAIN_SWIGLU = SwiGLU()


def _in_own_dtype(step):
    """The caller's autocast must not reach the matmuls: the arithmetic has the dtype that `Call` says."""

    @functools.wraps(step)
    def run(self: Call, *args, **kwargs):
        with torch.autocast(self._x.device.type, enabled=False):
            return step(self, *args, **kwargs)

    return run


class Call:
    """One call on this rank: the routing plan and the steps. Collective over `process_group`; so is every method but `__init__`'s checks.

    x             [T, H] floating; T may differ between ranks and be 0
    topk_idx      [T, K] int32 or int64, -1 = no expert; an expert named twice by one token counts twice
    topk_weights  [T, K] floating
    w13           (one [E_l, 2I, H],) gate rows then up rows, or (gate, up) of [E_l, I, H]; any floating dtype
    w2            [E_l, H, I]
    b13, b2       biases: split as w13, [E_l, 2I] or 2 x [E_l, I]; [E_l, H]
    dtype         of all arithmetic and results; default FP64 if x is FP64, else FP32
    """

    def __init__(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        w13: tuple[torch.Tensor, ...],
        w2: torch.Tensor,
        *,
        b13: tuple[torch.Tensor, ...] | None = None,
        b2: torch.Tensor | None = None,
        activation: SwiGLU = PLAIN_SWIGLU,
        precision: str = "bf16",
        dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ):
        self.dtype = dtype or compute_dtype(x.dtype)
        self._precision = resolve_precision(precision)
        self._act = activation
        self._experts = Experts.of(w13, w2, b13, b2)
        self._x, self._shape = x, topk_idx.shape
        # A weight where no expert is may hold anything, NaN too.
        self._p = topk_weights.to(self.dtype).masked_fill(topk_idx < 0, 0)
        num_ranks = 1 if process_group is None else process_group.size()
        self.exchange = Exchange(topk_idx, w2.shape[0] * num_ranks, process_group)

    @_in_own_dtype
    def gemm1(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(a, gate, up), each [num_rows, I], of the rows that this rank computes."""
        rows = self.exchange.dispatch_tokens(self._x).to(self.dtype)
        return rows_of.gemm1(rows, self.exchange.counts, self._experts, self._act, self._precision)

    @_in_own_dtype
    def gemm2(self, a: torch.Tensor) -> torch.Tensor:
        """y [T, H] of this rank's tokens, from the rows a [num_rows, I]."""
        slots = self._slots(rows_of.gemm2(a, self.exchange.counts, self._experts, self._precision))
        return _sum_in_slot_order(slots * self._p.unsqueeze(2))

    @_in_own_dtype
    def backward(self, dy: torch.Tensor, gate_up: tuple[torch.Tensor, torch.Tensor] | None, needs: frozenset[str]) -> dict:
        """{name: gradient} for the names in `needs`; "w13" and "b13" give (gate, up) pairs.

        gate_up: the pre-activation rows that `gemm1` returned, or None: GEMM 1 is done again. The same on every rank: None or not.
        """
        x, dy = self.exchange.dispatch_tokens(self._x).to(self.dtype), self.exchange.dispatch_tokens(dy).to(self.dtype)
        p = self.exchange.dispatch_entries(self._p.reshape(-1, 1)).squeeze(1)
        if gate_up is None:
            gate_up = rows_of.gemm1(x, self.exchange.counts, self._experts, self._act, self._precision)[1:]
        # A gradient that returns to the tokens' owners is made if any owner wants it: all ranks take part in its exchange.
        returned = ("x", "topk_weights")
        wanted = {name for name, flag in zip(returned, self.exchange.any_rank([name in needs for name in returned])) if flag}
        grads = rows_of.backward(
            x, dy, p, gate_up, self.exchange.counts, self._experts, act=self._act, precision=self._precision, needs=needs | wanted
        )
        out = {}
        if "x" in wanted:
            out["x"] = _sum_in_slot_order(self._slots(grads.dx))
        if "topk_weights" in wanted:
            out["topk_weights"] = self._slots(grads.dp.unsqueeze(1)).squeeze(2)
        out |= {"w13": (grads.dgate, grads.dup), "w2": grads.ddown, "b13": (grads.dgate_bias, grads.dup_bias), "b2": grads.ddown_bias}
        return {name: grad for name, grad in out.items() if name in needs}

    def _slots(self, rows: torch.Tensor) -> torch.Tensor:
        return self.exchange.collect(rows).view(*self._shape, rows.shape[1])


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _sum_in_slot_order(slots: torch.Tensor) -> torch.Tensor:
    """[T, K, H] -> [T, H], one slot after the other, so that the bits depend on nothing but the slots."""
    total = torch.zeros_like(slots[:, 0])
    for slot in slots.unbind(1):
        total = total + slot
    return total


def as_parts(w13: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (w13,) if isinstance(w13, torch.Tensor) else tuple(w13)


def forward(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    w2: torch.Tensor,
    *,
    b13: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    **options,
) -> torch.Tensor:
    """y [T, H], not rounded to the dtype of x. Arguments as in `Call`, of which `options` are the keywords; differentiable on one rank."""
    call = Call(x, topk_idx, topk_weights, as_parts(w13), w2, b13=None if b13 is None else as_parts(b13), **options)
    return call.gemm2(call.gemm1()[0])


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    w2: torch.Tensor,
    *,
    b13: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    b2: torch.Tensor | None = None,
    **options,
) -> dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """All gradients of `forward` by the closed form, given dy [T, H]: keys x, topk_weights, w13, w2, and with biases b13, b2.

    "w13" and "b13" come as they were given, one tensor or a pair. Nothing is rounded to the dtype of an input.
    """
    call = Call(x, topk_idx, topk_weights, as_parts(w13), w2, b13=None if b13 is None else as_parts(b13), b2=b2, **options)
    biases = {name for name, bias in (("b13", b13), ("b2", b2)) if bias is not None}
    grads = call.backward(dy, None, frozenset({"x", "topk_weights", "w13", "w2"} | biases))
    for name, given in (("w13", w13), ("b13", b13)):
        if isinstance(given, torch.Tensor):
            grads[name] = torch.cat(grads[name], 1)
    return grads
