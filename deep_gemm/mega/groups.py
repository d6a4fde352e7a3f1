"""Expert-parallel groups: who the ranks are, and memory that each of them can address.

A group has `rank`, `size`, `name`, `symmetric_empty(nbytes, device) -> (uint8 tensor, [address per rank])` and `all_gather_object(value) -> list`,
both collective and used at set-up only. Kernels see nothing but the addresses. `testing.VirtualGroup(...).rank(r)` is one more kind.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
import torch.distributed as dist

from deep_gemm.errors import BackendUnavailable


class Group(Protocol):
    rank: int
    size: int
    name: str

    def symmetric_empty(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, list[int]]:
        """Zero-filled uint8 [nbytes] of this rank, and the address of every rank's copy as this rank's `device` sees it, by rank."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """The value of every rank, by rank."""


class SingleGroup:
    """One rank: all experts are local."""

    rank = 0
    size = 1
    name = "single"
    process_group = None

    def symmetric_empty(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, list[int]]:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return memory, [memory.data_ptr()]

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


class ProcessGroupAdapter:
    """A `torch.distributed` group. `process_group` is what the reference backend exchanges through."""

    def __init__(self, process_group: dist.ProcessGroup):
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.name = process_group.group_name
        self._handles: list[Any] = []  # a symmetric region lives as long as its rendezvous handle
        if self.rank < 0:
            raise ValueError(f"group = {self.name!r}: expected a group that this process (global rank {dist.get_rank()}) belongs to")

    def symmetric_empty(self, nbytes: int, device: torch.device) -> tuple[torch.Tensor, list[int]]:
        if self.size == 1:
            return SingleGroup().symmetric_empty(nbytes, device)
        if device.type != "cuda":
            raise BackendUnavailable(f"no symmetric memory on {device}: torch symmetric memory exists for CUDA devices only; use backend 'reference'")
        # Read when torch sets up its first region: peers are reached by their plain addresses only, and a multicast object takes
        # resources of the whole NVLink domain.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        try:
            import torch.distributed._symmetric_memory as symmetric_memory

            memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
            handle = symmetric_memory.rendezvous(memory, self.process_group)
        except (ImportError, RuntimeError, AttributeError) as error:
            raise BackendUnavailable(
                f"no symmetric memory between the {self.size} ranks of group {self.name!r} on {device}: torch says: {error} "
                "(every rank needs its own GPU of one NVLink or PCIe peer-access domain, torch >= 2.9, and the same nbytes)"
            ) from error
        self._handles.append(handle)
        # torch may give memory of a destroyed buffer again, into which a peer that is late still writes: cleared when all have finished.
        torch.cuda.synchronize(device)
        # buffer_ptrs are where the segments begin; torch may put several tensors into one.
        bases = [int(address) for address in handle.buffer_ptrs]
        offsets = self.all_gather_object(memory.data_ptr() - bases[self.rank])
        memory.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(self.process_group)  # no peer may write before this rank has cleared
        return memory, [base + offset for base, offset in zip(bases, offsets, strict=True)]

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values


def resolve_group(group: Any) -> Group:
    """None -> one rank; a `torch.distributed.ProcessGroup` -> its adapter; an object that already is a group -> itself."""
    if group is None:
        return SingleGroup()
    if isinstance(group, dist.ProcessGroup):
        return ProcessGroupAdapter(group)
    if all(hasattr(group, attribute) for attribute in ("rank", "size", "name", "symmetric_empty", "all_gather_object")):
        return group
    raise TypeError(
        f"group = {group!r} ({type(group).__name__}): expected None (one rank), a torch.distributed.ProcessGroup, or a rank of a deep_gemm.testing.VirtualGroup"
    )
