"""Forward: A = everything through the activation, B = GEMM 2 and the combine.

A works on the first round only (with even routing there is no other); B finishes it and runs the rounds after it as a whole, so that what A
hands over, a [C, I], does not depend on the routing.
"""

from __future__ import annotations

from torch import Tensor

from deep_gemm.mega.backend import Problem
from deep_gemm.mega.staged.call import Call, Resources


def gemm1(resources: Resources, problem: Problem) -> tuple[Tensor, Tensor]:
    """(a [C, I], z [C, 2I] or empty)."""
    call = Call(resources, problem)
    rows, width = call.layout.capacity_rows, problem.buffer.intermediate_hidden
    a = problem.x.new_empty(rows, width)
    z = problem.x.new_empty((rows, 2 * width) if problem.save == "preact" else 0)
    call.publish("forward_publish")
    call.dispatch(0, x=True)
    _activate(call, 0, z if z.numel() else call.regions.z, a)
    problem.buffer.mark_published(a)
    return a, z


def gemm2(resources: Resources, problem: Problem, a: Tensor) -> Tensor:
    """y [T, H]."""
    call = Call(resources, problem)
    regions = call.regions
    y = problem.x.new_empty(problem.x.shape)
    if not problem.buffer.is_published(a):
        call.publish("forward_publish")
        call.dispatch(0, x=False)
    for index in range(call.layout.rounds):
        if index > 0:
            call.dispatch(index, x=True)
            _activate(call, index, regions.z, regions.act)
        call.m_grouped(index, a if index == 0 else regions.act, problem.w2, regions.rows[1], "k")
        call.push(index, regions.rows[1], bias=problem.b2)
    call.barrier("forward_push", pending_after=False)
    call.combine(y, weighted=True)
    problem.buffer.mark_published(None)
    return y


def _activate(call: Call, index: int, z: Tensor, a: Tensor) -> None:
    call.gemm1(index, z)
    call.swiglu(index, z, a)
