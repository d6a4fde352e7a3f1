"""R ranks of the staged backend on the CPU: kernels on the SIMT machine, GEMMs by torch, a thread per rank (so that barriers really wait)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from deep_gemm.activation import SwiGLU
from deep_gemm.mega.backend import Gradients, Problem, WeightGrads
from deep_gemm.mega.buffer import MegaMoeSettings, SymmetricMemory
from deep_gemm.mega.staged import backward, forward
from deep_gemm.mega.staged.call import Resources
from deep_gemm.mega.staged.faults import FaultRecords
from deep_gemm.mega.staged.regions import Regions, layout_of
from deep_gemm.testing.virtual import VirtualGroup


class TorchGemms:
    """Stands in for gemm_launch: the contract of docs/design.md, "GEMM", in FP32."""

    @staticmethod
    def _ranges(group_ends: torch.Tensor, window: tuple[int, int]):
        begin = 0
        for group, end in enumerate(group_ends.tolist()):
            low, high = max(begin, window[0]), min(end, window[1])
            yield group, low - window[0], high - window[0], begin, end
            begin = max(begin, -(-end // 128) * 128)

    def launch_m_grouped(self, a, b, d, group_ends, *, b_major, window, accumulate=False, num_sms=None, stream=None):
        for group, low, high, _, _ in self._ranges(group_ends, window):
            if high > low:
                weight = b[group].float().t() if b_major == "k" else b[group].float()
                result = a[low:high].float() @ weight
                d[low:high] = (result + d[low:high].float() if accumulate else result).to(d.dtype)

    def launch_k_grouped(self, a, b, d, group_ends, *, window, carry, accumulate, num_sms=None, stream=None):
        for group, low, high, begin, end in self._ranges(group_ends, window):
            empty = begin >= end
            if high <= low and not (empty and window[0] == 0 and not accumulate):
                continue
            result = a[low:high].float().t() @ b[low:high].float() if high > low else torch.zeros(d.shape[1:])
            carry_in, carry_out = begin < window[0] and not empty, end > window[1]
            if d.dtype == torch.float32:
                d[group] = result + d[group] if accumulate or carry_in else result
                continue
            parity = window[0] // (window[1] - window[0]) % 2  # this window's half to write, as in gemm_launch
            result = result + carry[1 - parity] if carry_in else result
            if carry_out:
                carry[parity].copy_(result)
            else:
                d[group] = (result + d[group].float() if accumulate else result).to(d.dtype)


class Buffer:
    """What the staged backend uses of a MegaMoeBuffer."""

    def __init__(self, settings: MegaMoeSettings, group, device: torch.device):
        self.settings, self.group, self.device, self.rank = settings, group, device, group.rank
        for name in (
            "num_experts",
            "num_ranks",
            "num_local_experts",
            "num_topk",
            "hidden",
            "intermediate_hidden",
            "num_max_tokens_per_rank",
        ):
            setattr(self, name, getattr(settings, name))
        self.symm = SymmetricMemory(*group.symmetric_empty(layout_of(settings).symm_bytes, device))
        self._published = None

    def mark_published(self, a):
        self._published = None if a is None else a.data_ptr()

    def is_published(self, a):
        return self._published == a.data_ptr()


class Ranks:
    """The ranks of one VirtualGroup on the CPU; `run(fn)` calls fn(rank) in a thread per rank and returns the results."""

    def __init__(self, launcher: Callable, num_ranks: int, *, timeout_s: float = 60.0, capacity_factor: float = 1.1, **shape: int):
        self.num_ranks = num_ranks
        self.settings = MegaMoeSettings(
            num_ranks=num_ranks, precision="bf16", capacity_factor=capacity_factor, backend="cuda", **shape
        ).validate()
        group, device, layout = VirtualGroup(num_ranks, "cpu"), torch.device("cpu"), layout_of(self.settings)
        self.buffers = [Buffer(self.settings, group.rank(rank), device) for rank in range(num_ranks)]
        self.resources = []
        for rank, buffer in enumerate(self.buffers):
            faults = FaultRecords(rank, self.settings.num_experts, self.settings.num_topk, timeout_s, pinned=False)
            self.resources.append(Resources(layout, Regions(buffer, layout), launcher, faults, num_sms=2, timeout_s=timeout_s))
        self.poison()

    def poison(self) -> None:
        for resources in self.resources:
            resources.regions.poison()

    def run(self, fn: Callable[[int], object], ranks: list[int] | None = None) -> list:
        chosen, results, errors = list(range(self.num_ranks)) if ranks is None else ranks, {}, []

        def work(rank: int) -> None:
            try:
                results[rank] = fn(rank)
            except BaseException as error:  # noqa: BLE001 - raised by the caller below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in chosen]

    def problem(self, rank: int, inputs: dict, *, activation: SwiGLU, save: str = "recompute") -> Problem:
        return Problem(activation=activation, precision="bf16", save=save, buffer=self.buffers[rank], **inputs)

    def gemm1(self, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
        return forward.gemm1(self.resources[problem.buffer.rank], problem)

    def gemm2(self, problem: Problem, a: torch.Tensor) -> torch.Tensor:
        return forward.gemm2(self.resources[problem.buffer.rank], problem, a)

    def backward(self, problem: Problem, dy: torch.Tensor, z: torch.Tensor, needs, grads: WeightGrads) -> Gradients:
        return backward.backward(self.resources[problem.buffer.rank], problem, dy, z, frozenset(needs), grads)
