"""Expert parallelism on one GPU in one process: R ranks, a stream each, SMs shared out, peers' memory as plain addresses.

    group = VirtualGroup(4, device)
    buffers = [get_symm_buffer_for_mega_moe(group.rank(r), ...) for r in range(4)]
    ys = group.run(lambda r: mega_moe(x[r], ..., buffers[r]))

The kernels are the ones that R GPUs would run: they see addresses only. What one GPU adds is that a rank's kernel may wait for another
rank's, so everything that could make the launches of the later ranks wait for the earlier ones has to happen before `run`: contexts with
enough hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), kernels loaded, memory reserved. This module and the buffers see to their part; torch
kernels that `fn` launches itself must have run once before. A wait that goes wrong ends by DG_TIMEOUT_S, not in a hang.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

MAX_CONNECTIONS = 32  # hardware queues that CUDA offers at most; streams beyond the number in use share one, and wait for each other
DEFAULT_CONNECTIONS = 8  # what a context has when CUDA_DEVICE_MAX_CONNECTIONS is not set
RESERVE_BYTES = 256 << 20  # per rank: outputs of small problems; a device allocation during a run may wait for running kernels

Result = TypeVar("Result")


class VirtualRank:
    """One rank of a VirtualGroup; a group in the sense of mega/groups.py."""

    process_group = None

    def __init__(self, group: VirtualGroup, rank: int):
        self._group = group
        self.rank, self.size, self.name, self.num_sms = rank, group.size, f"virtual{group.size}", group.num_sms_per_rank[rank]
        self._allocations = self._gathers = 0

    def symmetric_empty(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, list[int]]:
        """Zero-filled; the first rank that asks makes the memory of all. ValueError if the ranks ask for different sizes."""
        index, self._allocations = self._allocations, self._allocations + 1
        slabs = self._group.slabs(index, nbytes, torch.device(device), self.rank)
        return slabs[self.rank], [slab.data_ptr() for slab in slabs]

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values so far: the ranks come one after another, so a rank that has not come yet is shown as agreeing with the caller. A mismatch
        is therefore seen by the later of the two ranks; after one, go on with a new VirtualGroup."""
        index, self._gathers = self._gathers, self._gathers + 1
        known = self._group.gathered(index)
        known[self.rank] = value
        return [known.get(rank, value) for rank in range(self.size)]


class VirtualGroup:
    """`num_ranks` ranks on `device` (default: the current CUDA device; "cpu" for set-up without a GPU).

    num_sms_per_rank  CTAs of each rank's GEMMs: one number, or one for each rank; default: an equal share of the device
    reserve_bytes     memory put aside for each rank's stream, at once
    Raises ValueError (argument) and RuntimeError (too few hardware queues for that many ranks in a context that exists already).
    """

    def __init__(
        self,
        num_ranks: int,
        device: torch.device | str | None = None,
        num_sms_per_rank: int | Sequence[int] | None = None,
        reserve_bytes: int = RESERVE_BYTES,
    ):
        if not isinstance(num_ranks, int) or not 1 <= num_ranks <= MAX_CONNECTIONS:
            raise ValueError(f"num_ranks = {num_ranks!r}: expected 1..{MAX_CONNECTIONS}, a hardware queue each")
        self.device = torch.device(device if device is not None else "cuda")
        self.size = num_ranks
        self._slabs: dict[int, list[torch.Tensor]] = {}
        self._takers: dict[int, int] = {}
        self._gathers: dict[int, dict[int, Any]] = {}
        self._streams: list[torch.cuda.Stream] = []
        total = num_ranks
        if self.device.type == "cuda":
            _claim_queues(num_ranks)
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            total = torch.cuda.get_device_properties(self.device).multi_processor_count
            self._streams = _distinct_streams(num_ranks, self.device)
            self._prepare(reserve_bytes)
        self.num_sms_per_rank = _shares_of(total, num_ranks, num_sms_per_rank)
        self._ranks = [VirtualRank(self, rank) for rank in range(num_ranks)]

    def rank(self, index: int) -> VirtualRank:
        """Rank `index`: what `get_symm_buffer_for_mega_moe` takes as `group`."""
        if not 0 <= index < self.size:
            raise ValueError(f"rank {index}: expected 0..{self.size - 1}")
        return self._ranks[index]

    def stream(self, index: int) -> torch.cuda.Stream:
        """The stream of rank `index`."""
        return self._streams[index]

    def run(self, fn: Callable[[int], Result], ranks: list[int] | None = None) -> list[Result]:
        """[fn(0), fn(1), ...], each on its rank's stream, which begins after the current stream's work; the current stream then waits for all.

        fn must not synchronise: the ranks' kernels wait for those of ranks that are yet to be launched. `ranks` leaves some out (fault tests).
        """
        chosen = list(range(self.size)) if ranks is None else ranks
        if self.device.type != "cuda":
            return [fn(rank) for rank in chosen]
        current = torch.cuda.current_stream(self.device)
        results = []
        try:
            for rank in chosen:
                self._streams[rank].wait_stream(current)
            for rank in chosen:
                with torch.cuda.stream(self._streams[rank]):
                    results.append(fn(rank))
        finally:
            for rank in chosen:
                current.wait_stream(self._streams[rank])
        return results

    def slabs(self, index: int, nbytes: int, device: torch.device, rank: int) -> list[torch.Tensor]:
        """The memory of allocation `index` of every rank; for VirtualRank."""
        if device.type != self.device.type or device.index not in (None, self.device.index):
            raise ValueError(f"device = {device}: expected {self.device}, the device of the VirtualGroup")
        if index not in self._slabs:
            self._slabs[index] = [torch.zeros(nbytes, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        slabs = self._slabs[index]
        if slabs[0].numel() != nbytes:
            raise ValueError(
                f"rank {rank} asks for {nbytes} bytes of symmetric memory, an earlier rank of the group for {slabs[0].numel()}: expected equal"
            )
        self._takers[index] = self._takers.get(index, 0) + 1
        if self._takers[index] == self.size:  # from now on each rank's buffer keeps its own slab alive
            del self._slabs[index], self._takers[index]
        return slabs

    def gathered(self, index: int) -> dict[int, Any]:
        """Values of gather `index` by rank, so far; for VirtualRank."""
        return self._gathers.setdefault(index, {})

    def _prepare(self, reserve_bytes: int) -> None:
        """Puts memory aside per stream and makes torch load the few kernels that autograd launches by itself."""
        for stream in self._streams:
            with torch.cuda.stream(stream):
                blocks = [torch.empty(max(reserve_bytes, 1), dtype=torch.uint8, device=self.device)]
                blocks += [torch.empty(512, dtype=torch.uint8, device=self.device)]  # the allocator's pool of small blocks
                del blocks
        for dtype in (torch.bfloat16, torch.float32):
            value = torch.zeros(2, dtype=dtype, device=self.device)
            value.add_(torch.ones_like(value)).clone()
        torch.cuda.synchronize(self.device)


def _shares_of(total: int, num_ranks: int, asked: int | Sequence[int] | None) -> list[int]:
    """SMs by rank."""
    if asked is None:
        return [max(1, total // num_ranks)] * num_ranks
    shares = list(asked) if isinstance(asked, Sequence) else [asked] * num_ranks
    if len(shares) != num_ranks or not all(isinstance(share, int) and share >= 1 for share in shares):
        raise ValueError(f"num_sms_per_rank = {asked!r}: expected a positive number, {num_ranks} of them, or None")
    return shares


def _claim_queues(num_ranks: int) -> None:
    """Sets CUDA_DEVICE_MAX_CONNECTIONS while that still has an effect; RuntimeError when it is too late and needed."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if not torch.cuda.is_initialized():
        os.environ.setdefault(name, str(MAX_CONNECTIONS))
    given = os.environ.get(name, str(DEFAULT_CONNECTIONS))
    if not given.isdigit() or int(given) < num_ranks:
        raise RuntimeError(
            f"num_ranks = {num_ranks}, but {name} = {given}: ranks that share a hardware queue wait for each other; set {name}={MAX_CONNECTIONS} "
            "in the environment before the first use of CUDA"
        )


def _distinct_streams(count: int, device: torch.device) -> list[torch.cuda.Stream]:
    """torch hands out streams of a pool in turn, so the same one can come twice."""
    streams: dict[int, torch.cuda.Stream] = {}
    for _ in range(4 * MAX_CONNECTIONS):
        if len(streams) == count:
            return list(streams.values())
        stream = torch.cuda.Stream(device)
        streams.setdefault(stream.cuda_stream, stream)
    raise RuntimeError(f"torch gave only {len(streams)} different streams on {device}, expected {count}")
