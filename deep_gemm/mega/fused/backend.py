"""The CUDA backend whose forward is one launch per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deep_gemm import _C, gemm_launch, jit
from deep_gemm.mega.backend import Problem
from deep_gemm.mega.fused.config import choose_config
from deep_gemm.mega.fused.forward import pack
from deep_gemm.mega.staged.backend import StagedBackend
from deep_gemm.mega.staged.call import current_stream

if TYPE_CHECKING:
    from deep_gemm.mega.buffer import MegaMoeBuffer

RESERVED_SMS = 8
"""SMs that a launch with peers leaves to others, so that a collective of theirs can always run: a rank whose kernel holds every SM while it waits
for a peer that waits for this rank's NCCL would wait for ever. NCCL_MAX_CTAS=8 keeps its kernels inside."""


class FusedBackend(StagedBackend):
    """`Backend` (mega/backend.py): forward in one launch (fused/forward.py); backward as StagedBackend.

    save="recompute": A computes nothing, B is the launch, so that a recomputation of A (activation checkpointing) costs nothing. save="preact": A is
    the launch, which makes z and y; B copies y out of `a`.
    Launches of an EP group are cooperative: a grid starts when all its CTAs fit, or waits.
    """

    name = "fused"

    def __init__(self, buffer: MegaMoeBuffer):
        super().__init__(buffer)
        shared = self._resources.num_sms  # of a device that virtual ranks share: their launches must start side by side
        self._cooperative = shared is None
        self._config = choose_config(buffer.hidden, shared or gemm_launch.get_num_sms(buffer.device.index))
        self._kernel = jit.load(self._config.spec(), buffer.device.index)

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

    def _launch(self, problem: Problem, z: Tensor | None) -> Tensor:
        y = torch.empty_like(problem.x)
        num_ctas = self._num_ctas(problem.buffer)
        params = pack(self._resources, problem, y, z, self._config, num_ctas)
        self._kernel.launch(
            params, num_ctas, self._config.smem_bytes, current_stream(problem.buffer.device), self._config.cluster, self._cooperative
        )
        return y

    def _num_ctas(self, buffer: MegaMoeBuffer) -> int:
        num_sms = self._resources.num_sms or gemm_launch.get_num_sms(buffer.device.index) - (RESERVED_SMS if buffer.num_ranks > 1 else 0)
        cluster, most = self._config.cluster, _C.mega_moe_constants()["max_ctas"]
        return max(1, min(num_sms, most) // cluster) * cluster  # at least a cluster, whatever was asked for
