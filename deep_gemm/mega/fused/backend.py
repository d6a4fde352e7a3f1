"""The CUDA backend whose directions are one launch per rank each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deep_gemm import _C, environment, gemm_launch, jit
from deep_gemm.mega.backend import Gradients, Problem, WeightGrads
from deep_gemm.mega.fused import backward, forward
from deep_gemm.mega.fused.config import WGRAD_DTYPES, FusedConfig, choose_config
from deep_gemm.mega.staged.backend import StagedBackend
from deep_gemm.mega.staged.backward import Wanted, allocate
from deep_gemm.mega.staged.call import current_stream

if TYPE_CHECKING:
    from deep_gemm.mega.buffer import MegaMoeBuffer

RESERVED_SMS = 8
"""SMs that a launch with peers leaves to others, so that a collective of theirs can always run: a rank whose kernel holds every SM while it waits
for a peer that waits for this rank's NCCL would wait for ever. NCCL_MAX_CTAS=8 keeps its kernels inside."""


REMEMBERED_ARGUMENTS = 512  # of a buffer: a few KiB each, for every layer and micro-batch


def _one_launch_backward() -> bool:
    return environment.flag("DG_FUSED_BACKWARD")


class FusedBackend(StagedBackend):
    """`Backend` (mega/backend.py): forward in one launch (fused/forward.py); backward as StagedBackend, which is the faster one so far, or, under
    DG_FUSED_BACKWARD=1, in one launch (fused/backward.py) but for what that does not have (`backward.can_run`).

    save="recompute": A computes nothing, B is the launch, so that a recomputation of A (activation checkpointing) costs nothing. save="preact": A is
    the launch, which makes z and y; B copies y out of `a`.
    Launches of an EP group are cooperative: a grid starts when all its CTAs fit, or waits.
    """

    name = "fused"

    def __init__(self, buffer: MegaMoeBuffer):
        super().__init__(buffer)
        self._device = buffer.device
        shared = self._resources.num_sms  # of a device that virtual ranks share: their launches must start side by side
        self._cooperative = shared is None
        self._config = choose_config(shared or gemm_launch.get_num_sms(buffer.device.index))
        self._kernels: dict[FusedConfig, jit.LoadedKernel] = {}
        self._packed: dict[tuple, bytes] = {}
        self._kernel(self._config)
        if buffer.num_ranks > 1 and _one_launch_backward():  # with peers nothing may be compiled at a call: `load_kernels`
            for dtype in WGRAD_DTYPES:
                self._kernel(self._config.backward(dtype))

    def gemm1(self, problem: Problem) -> tuple[Tensor, Tensor]:
        z = problem.x.new_empty(self.fake_shapes(problem)[1])
        a = self._launch(problem, z) if z.numel() else problem.x.new_empty(0)
        problem.buffer.mark_published(None)
        return a, z

    def gemm2(self, problem: Problem, a: Tensor) -> Tensor:
        y = a.clone() if problem.save == "preact" else self._launch(problem, None)
        problem.buffer.mark_published(None)
        return y

    def fake_shapes(self, problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if problem.save != "preact":
            return (0,), (0,)
        return tuple(problem.x.shape), super().fake_shapes(problem)[1]

    def backward(self, problem: Problem, dy: Tensor, z: Tensor, needs: frozenset[str], grads: WeightGrads) -> Gradients:
        wanted = Wanted.of(needs)
        if not needs or not _one_launch_backward() or not backward.can_run(problem, wanted, grads):
            return super().backward(problem, dy, z, needs, grads)
        made = allocate(problem, wanted, grads)
        config, num_ctas, saved_z = (
            self._config.backward(backward.wgrad_dtype(grads)),
            self._num_ctas(problem.buffer),
            z if z.numel() else None,
        )
        gradients = (made.dx, made.dtopk_weights, made.dw2, *(made.dw13 or ()))
        params = self._remember(
            lambda: backward.pack(self._resources, problem, dy, saved_z, wanted, made, grads.accumulate, config, num_ctas),
            (config, num_ctas, wanted, grads.accumulate), problem, dy, saved_z, *gradients,
        )  # fmt: skip
        self._start(config, params, num_ctas)
        problem.buffer.mark_published(None)
        return made

    def _launch(self, problem: Problem, z: Tensor | None) -> Tensor:
        y = torch.empty_like(problem.x)
        num_ctas = self._num_ctas(problem.buffer)
        params = self._remember(
            lambda: forward.pack(self._resources, problem, y, z, self._config, num_ctas), (self._config, num_ctas), problem, y, z
        )
        self._start(self._config, params, num_ctas)
        return y

    def _remember(self, pack: Callable[[], bytes], options: tuple, problem: Problem, *tensors: Tensor | None) -> bytes:
        """The argument of a launch, made once for calls on the same memory: tensor maps take longer than the rest of a call."""
        given = (problem.x, problem.topk_idx, problem.topk_weights, *problem.w13, problem.w2, *(problem.b13 or ()), problem.b2, *tensors)
        key = (options, problem.activation, *map(gemm_launch.memory_of, given))
        params = self._packed.get(key)
        if params is None:
            if len(self._packed) >= REMEMBERED_ARGUMENTS:
                self._packed.clear()
            params = self._packed[key] = pack()
        return params

    def _start(self, config: FusedConfig, params: bytes, num_ctas: int) -> None:
        self._kernel(config).launch(params, num_ctas, config.smem_bytes, current_stream(self._device), config.cluster, self._cooperative)

    def _kernel(self, config: FusedConfig) -> jit.LoadedKernel:
        if config not in self._kernels:
            self._kernels[config] = jit.load(config.spec(), self._device.index)
        return self._kernels[config]

    def _num_ctas(self, buffer: MegaMoeBuffer) -> int:
        num_sms = self._resources.num_sms or gemm_launch.get_num_sms(buffer.device.index) - (RESERVED_SMS if buffer.num_ranks > 1 else 0)
        cluster, most = self._config.cluster, _C.mega_moe_constants()["max_ctas"]
        return max(1, min(num_sms, most) // cluster) * cluster  # at least a cluster, whatever was asked for
