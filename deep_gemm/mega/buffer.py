"""The buffer of Mega MoE: the settings that all ranks share, symmetric memory, and the backends with their scratch.

Made once per (group, shape), collectively, and used by every layer of that shape. Calls on one buffer are ordered by the stream they run on.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from deep_gemm._version import __version__
from deep_gemm.errors import BackendUnavailable
from deep_gemm.mega.backend import CUDA_BACKENDS, PRECISIONS, Backend, backend_class, on_device
from deep_gemm.mega.groups import Group, resolve_group

MAX_TOPK = 16
# Operands of the forward GEMMs by precision, in DeepGEMM's words: its callers give and read them.
MMA_TYPES = {"bf16": "bf16xbf16", "fp8_bwd": "bf16xbf16", "fp8": "fp8xfp8", "mxfp8": "fp8xfp8"}
CUDA_ALIGNMENT = 128  # columns: one swizzled TMA box holds 64 BF16, a tile of the GEMMs 128


@dataclass(frozen=True)
class MegaMoeSettings:
    """What every rank of a buffer has in common; compared between the ranks when the buffer is made."""

    num_experts: int
    num_ranks: int
    num_max_tokens_per_rank: int
    num_topk: int
    hidden: int
    intermediate_hidden: int
    precision: str
    capacity_factor: float
    backend: str

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def validate(self) -> MegaMoeSettings:
        """self, or ValueError / TypeError / NotImplementedError naming the setting at fault."""
        for name in ("num_experts", "num_max_tokens_per_rank", "num_topk", "hidden", "intermediate_hidden"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} = {value!r} ({type(value).__name__}): expected an int")
            if value < 1:
                raise ValueError(f"{name} = {value}: expected at least 1")
        if self.num_experts % self.num_ranks:
            raise ValueError(f"num_experts = {self.num_experts}: expected a multiple of the number of ranks, {self.num_ranks}")
        if self.num_topk > min(MAX_TOPK, self.num_experts):
            raise ValueError(f"num_topk = {self.num_topk}: expected 1..{min(MAX_TOPK, self.num_experts)} (num_experts = {self.num_experts})")
        if not isinstance(self.capacity_factor, (int, float)):
            raise TypeError(f"capacity_factor = {self.capacity_factor!r} ({type(self.capacity_factor).__name__}): expected a number")
        if not 0 < self.capacity_factor < float("inf"):
            raise ValueError(f"capacity_factor = {self.capacity_factor}: expected a positive number (rows held at once, in units of T*K)")
        if self.backend in CUDA_BACKENDS:
            for name in ("hidden", "intermediate_hidden"):
                value = getattr(self, name)
                if value % CUDA_ALIGNMENT:
                    padded = -(-value // CUDA_ALIGNMENT) * CUDA_ALIGNMENT
                    raise ValueError(f"{name} = {value}: expected a multiple of {CUDA_ALIGNMENT} on CUDA; pad to {padded}")
        check_precision(self.precision, self.backend)
        return self


def check_precision(precision: str, backend: str) -> None:
    known = PRECISIONS["reference"]
    if precision not in known:
        raise ValueError(f"precision = {precision!r}: expected one of {list(known)}")
    if precision not in PRECISIONS[backend]:
        raise NotImplementedError(
            f"precision = {precision!r}: backend {backend!r} has no kernels for it, only for {list(PRECISIONS[backend])}; use those, or backend='reference'"
        )


def resolve_backend_name(backend: str | None, device: torch.device) -> str:
    """`backend`, or the default for tensors on `device`; ValueError if there is none of that name."""
    if backend is None:
        return "cuda" if device.type == "cuda" else "reference"
    if backend not in list(PRECISIONS):  # a list: what came may have no hash
        raise ValueError(f"backend = {backend!r}: expected None or one of {list(PRECISIONS)}")
    return backend


@dataclass(frozen=True)
class SymmetricMemory:
    tensor: torch.Tensor  # uint8, of this rank
    addresses: list[int]  # of every rank's copy, by rank


_numbers = itertools.count(1)
_buffers: weakref.WeakValueDictionary[int, MegaMoeBuffer] = weakref.WeakValueDictionary()


def _new_handle(settings: MegaMoeSettings) -> int:
    """63 bits: a checksum of what the shapes of a call's intermediates depend on, then a number.

    torch.compile keeps graphs on disk under what they say. A handle that was the number alone would let a script that is run again with
    other settings, or another version, take up a graph whose activations have another shape.
    """
    return zlib.crc32(f"{__version__} {settings}".encode()) << 31 | next(_numbers)


def buffer_of(handle: int) -> MegaMoeBuffer:
    """The living buffer behind the integer that the registered ops carry."""
    buffer = _buffers.get(handle)
    if buffer is None:
        raise RuntimeError(f"buffer = handle {handle}: this MegaMoeBuffer was destroyed or is no longer referenced; keep it as long as its layers")
    return buffer


def _setting(name: str) -> property:
    return property(lambda self: getattr(self.settings, name))


class MegaMoeBuffer:
    """Made by `get_symm_buffer_for_mega_moe`, which documents the arguments.

    settings     MegaMoeSettings; each is an attribute of the buffer too, and `num_local_experts`
    group, rank  the resolved group (`groups.py`) and this process's place in it
    device       of all tensors of its calls
    symm         SymmetricMemory, or None if the backend needs none
    generation   calls that have published into the buffer so far
    handle       integer that stands for the buffer in registered ops; never the same for two buffers of one process
    """

    num_experts, num_ranks, num_local_experts = _setting("num_experts"), _setting("num_ranks"), _setting("num_local_experts")
    num_max_tokens_per_rank, num_topk = _setting("num_max_tokens_per_rank"), _setting("num_topk")
    hidden, intermediate_hidden = _setting("hidden"), _setting("intermediate_hidden")
    precision, capacity_factor, backend_name = _setting("precision"), _setting("capacity_factor"), _setting("backend")

    def __init__(self, group: Any, *, device: torch.device | str | None = None, backend: str | None = None, **settings: Any):
        self.group = resolve_group(group)
        self.device = _resolve_device(device)
        self.settings = _agree(self.group, self.device, backend, settings)
        self.rank = self.group.rank
        self.generation = 0
        self.symm: SymmetricMemory | None = None
        self._published: int | None = None
        self._backends: dict[str, Backend] = {}
        self.cuda_resources: Any = None  # of its CUDA backends: ranks count barriers together, whichever backend makes the call
        self._destroyed = False
        if self.backend_name in CUDA_BACKENDS:
            nbytes = backend_class(self.backend_name, self.device).symmetric_bytes(self.settings)
            with on_device(self.device):  # torch's pool of symmetric memory is that of the current device
                self.symm = SymmetricMemory(*self.group.symmetric_empty(nbytes, self.device))
        self._make_first_backend()
        self.handle = _new_handle(self.settings)
        _buffers[self.handle] = self

    def _make_first_backend(self) -> None:
        """All ranks leave together: one that still compiles would be late for the first call. If one cannot, all raise."""
        fault: Exception | None = None
        try:
            self.backend(self.backend_name)
        except Exception as error:  # noqa: BLE001 - sent to the peers, then raised
            fault = error
        _raise_fault(self.group, fault, self.group.all_gather_object(_described(fault)))

    def backend(self, name: str) -> Backend:
        """The buffer's own instance of backend `name`, made on first use; BackendUnavailable if it cannot run on this buffer."""
        backend = self._backends.get(name)
        if backend is None:
            self._require_alive()
            made = backend_class(name, self.device)
            if name in CUDA_BACKENDS and self.symm is None:
                raise BackendUnavailable(f"backend {name!r} needs symmetric memory, but this buffer was made for backend {self.backend_name!r}")
            backend = self._backends[name] = made(self)
        return backend

    def _require_alive(self) -> None:
        if self._destroyed:
            raise RuntimeError("buffer: it was destroyed (buffer.destroy()); make a new one with get_symm_buffer_for_mega_moe")

    def mark_published(self, a: torch.Tensor | None) -> None:
        """The exchanged routing in the buffer now belongs to the call whose activations are `a` (None: to no call that goes on)."""
        self.generation += 1
        self._published = None if a is None else a.data_ptr()

    def is_published(self, a: torch.Tensor) -> bool:
        """Whether the exchanged routing is still that of `a`'s call. `a` is alive, so no other call's tensor has its address."""
        return self._published == a.data_ptr()

    @property
    def mma_type(self) -> str:
        """DeepGEMM's word for `precision`, for callers written for it."""
        return MMA_TYPES[self.precision]

    def check(self) -> None:
        """Wait for the device, then raise the fault (id out of range: ValueError; late peer: PeerTimeoutError) that an earlier call recorded."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for backend in self._backends.values():
            backend.check()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory it holds now: symmetric memory, the backends' scratch, the input views."""
        views = (self.__dict__[name].nbytes for name in ("x", "topk_idx", "topk_weights") if name in self.__dict__)
        symmetric = 0 if self.symm is None else self.symm.tensor.nbytes
        return symmetric + sum(views) + sum(backend.nbytes for backend in self._backends.values())

    @cached_property
    def x(self) -> torch.Tensor:
        """[num_max_tokens_per_rank, hidden] BF16: input of the forward-only calls (`bf16_mega_moe`), filled by the caller."""
        self._require_alive()
        return torch.zeros(self.num_max_tokens_per_rank, self.hidden, dtype=torch.bfloat16, device=self.device)

    @cached_property
    def topk_idx(self) -> torch.Tensor:
        """[num_max_tokens_per_rank, num_topk] int64, -1 = no expert: input of the forward-only calls."""
        self._require_alive()
        return torch.full((self.num_max_tokens_per_rank, self.num_topk), -1, dtype=torch.int64, device=self.device)

    @cached_property
    def topk_weights(self) -> torch.Tensor:
        """[num_max_tokens_per_rank, num_topk] FP32: input of the forward-only calls."""
        self._require_alive()
        return torch.zeros(self.num_max_tokens_per_rank, self.num_topk, dtype=torch.float32, device=self.device)

    def destroy(self) -> None:
        """Free what it holds. On every rank, after the last call on it; later calls raise."""
        if self.device.type == "cuda" and not self._destroyed:
            torch.cuda.synchronize(self.device)  # kernels in flight may still write into a peer
        self._destroyed = True
        _buffers.pop(self.handle, None)
        self._backends.clear()
        self.symm = self.cuda_resources = None
        for name in ("x", "topk_idx", "topk_weights"):
            self.__dict__.pop(name, None)

    def __deepcopy__(self, memo: dict) -> MegaMoeBuffer:
        return self  # a copied layer goes on sharing it: a copy would have to be made by all ranks at once

    def __reduce__(self) -> Any:
        raise TypeError("MegaMoeBuffer cannot be pickled: it belongs to this process and group; make one where the layer is loaded")

    def __repr__(self) -> str:
        shown = ", ".join(f"{field.name}={getattr(self.settings, field.name)!r}" for field in fields(self.settings))
        return f"MegaMoeBuffer(rank={self.rank}, device={str(self.device)!r}, {shown})"


def _resolve_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return device


def _agree(group: Group, device: torch.device, backend: str | None, settings: dict[str, Any]) -> MegaMoeSettings:
    """The settings, the same on every rank; otherwise every rank raises, one that is at fault its own error.

    A rank with a fault still takes part in the exchange, so that its peers learn of it and nobody waits.
    """
    fault: Exception | None = None
    mine: dict[str, Any] = {}
    try:
        name = resolve_backend_name(backend, device)
        mine = {**settings, "backend": name}
        checked = MegaMoeSettings(num_ranks=group.size, **mine).validate()
        backend_class(name, device)
    except Exception as error:  # noqa: BLE001 - sent to the peers, then raised below
        fault = error
    reports = group.all_gather_object((_described(fault), mine))
    _raise_mismatch(group, reports)
    _raise_fault(group, fault, [text for text, _ in reports])
    return checked


def _described(fault: Exception | None) -> str | None:
    return None if fault is None else f"{type(fault).__name__}: {fault}"


def _raise_fault(group: Group, own: Exception | None, faults: list[str | None]) -> None:
    if own is not None:
        raise own
    for rank, text in enumerate(faults):
        if text is not None:
            raise ValueError(f"rank {rank} of group {group.name!r} could not make its buffer: {text}")


def _raise_mismatch(group: Group, reports: list[tuple[str | None, dict[str, Any]]]) -> None:
    first = reports[0][1]
    for rank, (_, theirs) in enumerate(reports):
        for name in first.keys() & theirs.keys():
            if first[name] != theirs[name]:
                raise ValueError(
                    f"{name} differs between the ranks of group {group.name!r}: rank 0 has {first[name]!r}, rank {rank} has {theirs[name]!r}; "
                    "expected the same value on every rank"
                )
