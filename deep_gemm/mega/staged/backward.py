"""Backward: one publish, the rounds, one combine. Per round, in this order, because memory is reused:

    x, dy rows -> z (recomputed, or saved for round 0) -> dA' = dy W2 -> dZ, A' = p a, dp -> bias gradients -> dW2, dW13 -> dx rows -> push

dx rows overwrite dy rows; with split gate and up weights they are summed in FP32 over the x and dy rows (dx = dZ_gate W1 + dZ_up W3, one
rounding), so the weight gradients, the last readers of both, come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deep_gemm.mega.backend import Gradients, Problem, WeightGrads
from deep_gemm.mega.staged.call import Call, Resources


@dataclass(frozen=True)
class Wanted:
    """Which work `needs` asks for."""

    x: bool
    topk_weights: bool
    w13: bool
    w2: bool
    b13: bool
    b2: bool

    @classmethod
    def of(cls, needs: frozenset[str]) -> Wanted:
        return cls(**{name: name in needs for name in cls.__dataclass_fields__})

    @property
    def dz(self) -> bool:
        return self.x or self.topk_weights or self.w13 or self.b13

    @property
    def z(self) -> bool:
        return self.dz or self.w2

    @property
    def detail(self) -> int:
        """What ranks must agree on, because owners combine what others push: compared by the barrier."""
        return self.x | self.topk_weights << 1


def backward(resources: Resources, problem: Problem, dy: Tensor, saved_z: Tensor, needs: frozenset[str], grads: WeightGrads) -> Gradients:
    """saved_z: z of round 0 as `gemm1` returned it, or empty."""
    if not needs:
        return Gradients()
    wanted = Wanted.of(needs)
    made = allocate(problem, wanted, grads)
    call = Call(resources, problem)
    call.publish("backward_publish", dy=dy, detail=wanted.detail)
    for index in range(call.layout.rounds):
        _Round(call, problem, index, wanted, made, grads.accumulate).run(saved_z)
    call.barrier("backward_push", pending_after=False, detail=wanted.detail)
    if wanted.x or wanted.topk_weights:
        call.combine(made.dx, weighted=False, dp_out=made.dtopk_weights)
    problem.buffer.mark_published(None)
    return made


def allocate(problem: Problem, wanted: Wanted, grads: WeightGrads) -> Gradients:
    """The tensors to write: those given, and new ones."""

    def like(target: Tensor | None, tensor: Tensor | None, asked: bool) -> Tensor | None:
        if not asked or tensor is None:
            return None
        return torch.empty_like(tensor, dtype=grads.dtype) if target is None else target

    def pair(targets: tuple[Tensor, ...] | None, tensors: tuple[Tensor, ...] | None, asked: bool) -> tuple[Tensor, ...] | None:
        if not asked or tensors is None:
            return None
        return tuple(like(target, tensor, asked) for target, tensor in zip(targets or (None,) * len(tensors), tensors, strict=True))

    return Gradients(
        dx=torch.empty_like(problem.x) if wanted.x else None,
        dtopk_weights=torch.empty_like(problem.topk_weights) if wanted.topk_weights else None,
        dw13=pair(grads.dw13, problem.w13, wanted.w13),
        dw2=like(grads.dw2, problem.w2, wanted.w2),
        db13=pair(grads.db13, problem.b13, wanted.b13),
        db2=like(grads.db2, problem.b2, wanted.b2),
    )


@dataclass(frozen=True)
class _Round:
    call: Call
    problem: Problem
    index: int
    wanted: Wanted
    made: Gradients
    accumulate: bool

    def run(self, saved_z: Tensor) -> None:
        call, wanted, index = self.call, self.wanted, self.index
        saved = index == 0 and saved_z.numel() > 0
        call.dispatch(index, x=wanted.w13 or (wanted.z and not saved), dy=True)
        z = saved_z if saved else call.regions.z
        if wanted.z and not saved:
            call.gemm1(index, z)
        if wanted.dz:
            call.m_grouped(index, call.regions.rows[1], self.problem.w2, call.regions.act, "mn")
            call.dswiglu(index, z)
        elif wanted.w2:
            call.swiglu(index, z, call.regions.act, weighted=True)
        self._bias_gradients()
        self._weight_gradients()
        rows = self._dx_rows() if wanted.x else None
        if wanted.x or wanted.topk_weights:
            call.push(index, rows, dp=wanted.topk_weights)

    def _bias_gradients(self) -> None:
        call, made, regions = self.call, self.made, self.call.regions
        if made.db2 is not None:
            call.bias_grad(self.index, regions.rows[1], regions.bias_sums2, made.db2, weighted=True, accumulate=self.accumulate)
        if made.db13 is not None:
            sums = regions.bias_sums13.view(len(made.db13), -1)  # contiguous per part, as the kernel counts columns
            for part, part_sums, out in zip(call.halves(regions.z), sums, made.db13, strict=True):
                call.bias_grad(self.index, part, part_sums, out, weighted=False, accumulate=self.accumulate)

    def _weight_gradients(self) -> None:
        call, made, regions = self.call, self.made, self.call.regions
        if made.dw2 is not None:
            call.k_grouped(self.index, regions.rows[1], regions.act, made.dw2, carry=regions.carry2, accumulate=self.accumulate)
        if made.dw13 is not None:
            carries = (None,) * len(made.dw13) if regions.carry13 is None else regions.carry13.chunk(len(made.dw13), dim=1)
            for part, carry, out in zip(call.halves(regions.z), carries, made.dw13, strict=True):
                call.k_grouped(self.index, part, regions.rows[0], out, carry=carry, accumulate=self.accumulate)

    def _dx_rows(self) -> Tensor:
        call, regions = self.call, self.call.regions
        parts = call.halves(regions.z)
        out = regions.rows[1] if len(parts) == 1 else regions.dx_sum
        for position, (part, weight) in enumerate(zip(parts, self.problem.w13, strict=True)):
            call.m_grouped(self.index, part, weight, out, "mn", accumulate=position > 0)
        return out
