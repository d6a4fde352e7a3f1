"""The CUDA backend that runs each direction of Mega MoE as several launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deep_gemm import environment, jit
from deep_gemm.gemm_config import choose_config
from deep_gemm.gemm_launch import get_num_sms
from deep_gemm.mega.backend import Gradients, Problem, WeightGrads
from deep_gemm.mega.fused.config import choose_config as choose_fused
from deep_gemm.mega.staged import backward, forward
from deep_gemm.mega.staged.call import Resources
from deep_gemm.mega.staged.faults import FaultRecords
from deep_gemm.mega.staged.kernels import Launcher
from deep_gemm.mega.staged.regions import Regions, layout_of

if TYPE_CHECKING:
    from deep_gemm.mega.buffer import MegaMoeBuffer, MegaMoeSettings


class StagedBackend:
    """`Backend` (mega/backend.py) over the kernels of kernels.py and the grouped GEMMs, BF16.

    Guarantees: same inputs, same bits; no host sync; capturable in a CUDA graph (all memory of a call is allocated before its first launch).
    All calls of a buffer run on one stream, or on streams that the caller orders.
    Kernels use as many SMs as `set_num_sms` says at the call, or the rank's share of a VirtualGroup. Waits for peers end after DG_TIMEOUT_S,
    read when the buffer is made.
    """

    name = "cuda"

    def __init__(self, buffer: MegaMoeBuffer):
        self._owns_resources = buffer.cuda_resources is None
        if self._owns_resources:
            buffer.cuda_resources = make_resources(buffer)
        self._resources: Resources = buffer.cuda_resources

    @staticmethod
    def symmetric_bytes(settings: MegaMoeSettings) -> int:
        """Size of a rank's symmetric slab, zero-filled before the first call."""
        return layout_of(settings).symm_bytes

    @staticmethod
    def scratch_bytes(settings: MegaMoeSettings) -> int:
        """Size of a rank's scratch; like the slab's, it does not depend on the routing."""
        return layout_of(settings).scratch_bytes

    @property
    def nbytes(self) -> int:
        return self._resources.regions.nbytes if self._owns_resources else 0

    def gemm1(self, problem: Problem) -> tuple[Tensor, Tensor]:
        return forward.gemm1(self._resources, problem)

    def gemm2(self, problem: Problem, a: Tensor) -> Tensor:
        return forward.gemm2(self._resources, problem, a)

    def backward(self, problem: Problem, dy: Tensor, z: Tensor, needs: frozenset[str], grads: WeightGrads) -> Gradients:
        return backward.backward(self._resources, problem, dy, z, needs, grads)

    def fake_shapes(self, problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows, width = layout_of(problem.buffer.settings).capacity_rows, problem.buffer.intermediate_hidden
        return (rows, width), (rows, 2 * width) if problem.save == "preact" else (0,)

    def check(self) -> None:
        self._resources.faults.check()

    def poison(self) -> None:
        """Fills all memory that must hold nothing between calls with NaN. For tests."""
        self._resources.regions.poison()


def make_resources(buffer: MegaMoeBuffer) -> Resources:
    """Scratch, fault records and loaded kernels of a buffer."""
    device, layout, timeout_s = buffer.device, layout_of(buffer.settings), read_timeout_s()
    made = Resources(
        layout=layout,
        regions=Regions(buffer, layout),
        launch=Launcher(device.index),
        faults=FaultRecords(buffer.rank, buffer.num_experts, buffer.num_topk, timeout_s, pinned=device.type == "cuda"),
        num_sms=getattr(buffer.group, "num_sms", None),  # a VirtualGroup shares the device out
        timeout_s=timeout_s,
    )
    if buffer.num_ranks > 1:
        load_kernels(buffer.settings, made.num_sms or get_num_sms(device.index), device.index)
    torch.cuda.synchronize(device)  # scratch is cleared before any stream uses it
    return made


def read_timeout_s() -> float:
    """DG_TIMEOUT_S, seconds."""
    text = environment.text("DG_TIMEOUT_S")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ValueError(f"DG_TIMEOUT_S = {text!r}: expected a number of seconds between 0 and 1e6")
    return value


def gemm_specs(settings: MegaMoeSettings, num_sms: int) -> list[jit.KernelSpec]:
    """The GEMM variants that calls with these settings can ask for."""
    bf16, f32 = torch.bfloat16, torch.float32
    hidden, width = settings.hidden, settings.intermediate_hidden
    m_grouped = [("k", bf16, 2 * width, hidden), ("k", bf16, width, hidden), ("k", bf16, hidden, width)]  # GEMM 1 (one or two weights), GEMM 2
    m_grouped += [("mn", bf16, width, hidden), ("mn", bf16, hidden, 2 * width), ("mn", f32, hidden, width)]  # dgrad 2, dgrad 1 (one or two)
    configs = [choose_config("m_ends", "k", b, d, 0, n, k, num_sms) for b, d, n, k in m_grouped]
    k_grouped = [(hidden, width), (2 * width, hidden), (width, hidden)]  # wgrad 2, wgrad 1 (one or two)
    configs += [choose_config("k_ends", "mn", "mn", d, m, n, 0, num_sms) for d in (bf16, f32) for m, n in k_grouped]
    return list(dict.fromkeys(config.spec() for config in configs))


def load_kernels(settings: MegaMoeSettings, num_sms: int, device_index: int) -> None:
    """Loads every GEMM, and the fused forward, that calls can use (FusedBackend loads its backward). With peers nothing may be compiled at a call: a rank with a warm cache would wait in a barrier for one
    that compiles, perhaps longer than DG_TIMEOUT_S; and in a process that runs several ranks, loading while a kernel waits could block."""
    for spec in [*gemm_specs(settings, num_sms), choose_fused(num_sms).spec()]:
        jit.load(spec, device_index)
