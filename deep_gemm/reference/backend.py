"""`ReferenceBackend`: the oracle behind the `Backend` protocol, on any device and any torch.distributed backend.

Layout of a and z: one row per (token, slot) on the *owner* of the token, [T*K, I] and [T*K, 2I], zeros where the expert is -1. Their shape so
depends on the shape of topk_idx only, and a rank holds no more than its own tokens need; the price, rows that travel once more, is nothing
here. They hold FP32 (FP64 for FP64 inputs): a narrower dtype of x is a view of the bytes, because the protocol gives a and z the dtype of x
and the oracle rounds nothing in between. So with BF16 they have twice the columns.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..errors import BackendUnavailable
from ..mega.backend import Gradients, Problem, WeightGrads
from .moe import Call, compute_dtype


def _process_group(buffer) -> dist.ProcessGroup | None:
    if buffer.num_ranks == 1:
        return None
    group = getattr(buffer.group, "process_group", None)
    if group is None:
        raise BackendUnavailable(
            f"backend 'reference' exchanges rows through torch.distributed, but the group of this buffer is a {type(buffer.group).__name__} of "
            f"{buffer.num_ranks} ranks without a ProcessGroup: make the buffer with a torch.distributed group, or use backend 'cuda'"
        )
    return group


def _columns_in(dtype: torch.dtype, columns: int) -> int:
    return columns * compute_dtype(dtype).itemsize // dtype.itemsize


def _write(grad: torch.Tensor, given: torch.Tensor | None, grads: WeightGrads) -> torch.Tensor:
    """Into `given`, rounded once (after the addition, when accumulating), or a new tensor in `grads.dtype`."""
    if given is None:
        return grad.to(grads.dtype)
    return given.copy_(given + grad if grads.accumulate else grad)


def _write_parts(halves: tuple[torch.Tensor, ...], num_parts: int, given: tuple[torch.Tensor, ...] | None, grads: WeightGrads) -> tuple:
    parts = halves if num_parts == 2 else (torch.cat(halves, 1),)
    return tuple(_write(part, target, grads) for part, target in zip(parts, given or (None,) * num_parts))


class ReferenceBackend:
    """Keeps nothing between calls. In an expert-parallel group every rank makes the same calls in the same order, with T = 0 too.

    save and precision are the same on every rank; needs may differ.
    """

    name = "reference"
    nbytes = 0

    def __init__(self, buffer):
        self._group = _process_group(buffer)

    def _call(self, problem: Problem) -> Call:
        return Call(
            problem.x,
            problem.topk_idx,
            problem.topk_weights,
            problem.w13,
            problem.w2,
            b13=problem.b13,
            b2=problem.b2,
            activation=problem.activation,
            precision=problem.precision,
            process_group=self._group,
        )

    @torch.no_grad()
    def gemm1(self, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        call = self._call(problem)
        a, gate, up = call.gemm1()
        z = call.exchange.collect(torch.cat((gate, up), 1)) if problem.save == "preact" else a.new_empty(0)
        a = call.exchange.collect(a).view(problem.x.dtype)
        problem.buffer.mark_published(a)
        return a, z.view(problem.x.dtype)

    @torch.no_grad()
    def gemm2(self, problem: Problem, a: torch.Tensor) -> torch.Tensor:
        call = self._call(problem)
        return call.gemm2(call.exchange.dispatch_entries(a.view(call.dtype))).to(problem.x.dtype)

    @torch.no_grad()
    def backward(self, problem: Problem, dy: torch.Tensor, z: torch.Tensor, needs: frozenset[str], grads: WeightGrads) -> Gradients:
        call = self._call(problem)
        gate_up = call.exchange.dispatch_entries(z.view(call.dtype)).chunk(2, 1) if problem.save == "preact" else None
        made = call.backward(dy, gate_up, needs)
        problem.buffer.mark_published(None)
        num_parts = len(problem.w13)
        return Gradients(
            dx=made["x"].to(problem.x.dtype) if "x" in made else None,
            dtopk_weights=made["topk_weights"].to(problem.topk_weights.dtype) if "topk_weights" in made else None,
            dw13=_write_parts(made["w13"], num_parts, grads.dw13, grads) if "w13" in made else None,
            dw2=_write(made["w2"], grads.dw2, grads) if "w2" in made else None,
            db13=_write_parts(made["b13"], num_parts, grads.db13, grads) if "b13" in made else None,
            db2=_write(made["b2"], grads.db2, grads) if "b2" in made else None,
        )

    def fake_shapes(self, problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        entries = problem.topk_idx.shape[0] * problem.topk_idx.shape[1]
        columns = _columns_in(problem.x.dtype, problem.w2.shape[2])
        return (entries, columns), (entries, 2 * columns) if problem.save == "preact" else (0,)

    def check(self) -> None:
        """Nothing is recorded: an error of this backend is raised where it happens."""
