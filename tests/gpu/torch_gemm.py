"""The launches of deep_gemm/gemm_launch.py by torch, for the rehearsal of their tests without a GPU. FP64 sums, so that bits do
not depend on how many rows are multiplied at once; what a kernel may leave in padding rows is NaN here."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deep_gemm import reference
from deep_gemm.activation import SwiGLU
from deep_gemm.gemm_launch import DP_COLUMNS, GROUP_ALIGNMENT, NO_WINDOW, Gate, Gather

BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Part:
    """The rows of a group that a window shows, in rows of the pool; whether the group began earlier, goes on later, has none at all."""

    group: int
    rows: slice
    earlier: bool
    later: bool
    without_rows: bool

    @property
    def empty(self) -> bool:
        return self.rows.start >= self.rows.stop

    @property
    def padding(self) -> slice:
        return slice(self.rows.stop, -(-self.rows.stop // GROUP_ALIGNMENT) * GROUP_ALIGNMENT)


def parts(ends: torch.Tensor, window: tuple[int, int]) -> Iterator[Part]:
    begin = 0
    for group, end in enumerate(ends.tolist()):
        low, high = max(begin, window[0]), min(end, window[1])
        yield Part(group, slice(low - window[0], max(low, high) - window[0]), begin < window[0], end > window[1], begin >= end)
        begin = max(begin, -(-end // GROUP_ALIGNMENT) * GROUP_ALIGNMENT)


def operand(source: torch.Tensor, rows: torch.Tensor | None, part: slice) -> torch.Tensor:
    if rows is None:
        return source[part].double()
    listed = rows[part].long()
    return torch.where(listed[:, None] < 0, 0.0, source[listed.clamp(min=0)].double())


def launch_m_grouped(a, b, d, group_ends, *, b_major, rows=None, window=NO_WINDOW, accumulate=False, num_sms=None, stream=None) -> None:
    weight = b if b_major == "k" else b.transpose(1, 2)
    for part in parts(group_ends, window):
        result = operand(a, rows, part.rows) @ weight[part.group].double().t()
        d[part.rows] = (result + d[part.rows] if accumulate else result).to(d.dtype)


def launch_k_grouped(
    a, b, d, group_ends, *, gather: Gather | None = None, window=NO_WINDOW, carry=None, accumulate=False, num_sms=None, stream=None
) -> None:
    lists = {"a": None, "b": None} | ({gather.operand: gather.rows} if gather else {})
    sources = {"a": a, "b": b} | ({gather.operand: gather.source} if gather else {})
    parity = 0 if carry is None else window[0] // (window[1] - window[0]) % 2
    for part in parts(group_ends, window):
        if part.empty:
            if not accumulate and window[0] == 0 and part.without_rows:
                d[part.group] = 0
            continue
        left, right = (operand(sources[name], lists[name], part.rows) for name in ("a", "b"))
        result, whole = left.t() @ right, d.dtype == F32
        if part.earlier:
            result = result + (d[part.group] if whole else carry[1 - parity])
        if accumulate and not (part.earlier if whole else part.later):
            result = result + d[part.group]
        if part.later and not whole:
            carry[parity] = result
        else:
            d[part.group] = result.to(d.dtype)


def at(address: int, shape: tuple[int, ...], strides_bytes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory by its address, as the kernels get it."""
    nbytes = sum((n - 1) * s for n, s in zip(shape, strides_bytes, strict=True)) + dtype.itemsize
    memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)
    return memory.as_strided(shape, [s // dtype.itemsize for s in strides_bytes])


class Gated:
    """The inputs of the gated epilogues that Gate has the addresses of."""

    def __init__(self, gate: Gate, width: int, num_rows: int):
        self.gate, self.width, self.num_rows = gate, width, num_rows
        self.activation = SwiGLU(gate.alpha, gate.up_offset, gate.clamp)

    def biased(self, z: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        halves = z.double().chunk(2, 1)
        if not self.gate.gate_bias:
            return halves
        begins = (address + 2 * group * self.gate.bias_stride for address in (self.gate.gate_bias, self.gate.up_bias))
        return tuple(half + at(begin, (self.width,), (2,), BF16) for half, begin in zip(halves, begins, strict=True))

    def weight(self, rows: slice) -> torch.Tensor:
        if not self.gate.row_weight:
            return torch.ones(rows.stop - rows.start, 1)
        return at(self.gate.row_weight, (self.num_rows,), (self.gate.row_weight_stride,), F32)[rows, None]


def launch_swiglu(x, w_gate, w_up, a, group_ends, gate: Gate, *, z=None, rows=None, window=NO_WINDOW, num_sms=None, stream=None) -> None:
    inputs = Gated(gate, a.shape[1], a.shape[0])
    for part in parts(group_ends, window):
        if part.empty:
            continue
        weight = torch.cat((w_gate[part.group], w_up[part.group])).double()
        made = (operand(x, rows, part.rows) @ weight.t()).to(BF16)
        a[part.rows] = (inputs.weight(part.rows) * reference.swiglu(*inputs.biased(made, part.group), inputs.activation)).to(BF16)
        a[part.padding] = float("nan")
        if z is not None:
            z[part.rows] = made
            z[part.padding] = float("nan")


def launch_dswiglu(dy, w2, z, dz, act, row_dp, group_ends, gate: Gate, *, rows=None, window=NO_WINDOW, num_sms=None, stream=None) -> None:
    inputs = Gated(gate, act.shape[1], act.shape[0])
    for part in parts(group_ends, window):
        if part.empty:
            continue
        da = operand(dy, rows, part.rows) @ w2[part.group].double()
        biased, p = inputs.biased(z[part.rows], part.group), inputs.weight(part.rows)
        a = reference.swiglu(*biased, inputs.activation)
        dz[part.rows] = torch.cat(reference.dswiglu(*biased, p * da, inputs.activation), 1).to(BF16)
        act[part.rows] = (p * a).to(BF16)
        row_dp[:, part.rows] = torch.stack([columns.sum(1) for columns in (da * a).split(DP_COLUMNS, 1)])
        for result in (dz, act):
            result[part.padding] = float("nan")


def launch(kind, a, b, d, *, m, layout=None, num_groups=1, window=NO_WINDOW, num_sms=None) -> None:
    """kind: m_index."""
    for group in range(num_groups):
        rows = layout == group
        d[rows] = (a[rows].double() @ b[group].double().t()).to(d.dtype)
