"""What kernels report without a synchronisation: records in pinned host memory, turned into exceptions when the host next looks."""

from __future__ import annotations

import ctypes
import struct

import torch

from deep_gemm import _C
from deep_gemm.errors import PeerTimeoutError

_FORMATS = {"i32": "i", "u32": "I", "i64": "q"}


class FaultRecords:
    """The fault records of one rank (layout/mega_moe_layout.h, MegaMoeFault).

    A bad id is raised once, then the buffer goes on. A failed wait is raised by every later look: the ranks are out of step for good.
    """

    def __init__(self, rank: int, num_experts: int, num_topk: int, timeout_s: float, *, pinned: bool):
        self._rank, self._num_experts, self._num_topk, self._timeout_s = rank, num_experts, num_topk, timeout_s
        self._size = _C.struct_size("MegaMoeFault")
        self._fields = [(name, _FORMATS[kind], offset) for name, kind, offset, _ in _C.struct_fields("MegaMoeFault")]
        constants = _C.mega_moe_constants()
        self._kind_names, self._phases, self._detail_shift = constants["faults"], constants["phases"], constants["tag_detail_shift"]
        count = constants["fault_records"]
        self._memory = torch.zeros(count * self._size, dtype=torch.uint8, pin_memory=pinned)
        kind_offset = next(offset for name, _, offset in self._fields if name == "kind")
        starts = [self._memory.data_ptr() + i * self._size for i in range(count)]
        # Written by the device at any time: read through ctypes, which never caches.
        self._id_kind, self._peer_kind = (ctypes.c_uint32.from_address(start + kind_offset) for start in starts)
        self._id_address, self._peer_address = starts

    @property
    def address(self) -> int:
        """Of the records, as the device and the host see it (unified addressing)."""
        return self._memory.data_ptr()

    def check(self) -> None:
        """Raises PeerTimeoutError after a failed wait, ValueError after a bad id; reads host memory only."""
        if self._peer_kind.value:
            raise PeerTimeoutError(self._peer_text(self._read(self._peer_address)))
        if self._id_kind.value:
            fault = self._read(self._id_address)
            self._id_kind.value = 0
            raise ValueError(self._id_text(fault))

    def _read(self, address: int) -> dict[str, int]:
        raw = ctypes.string_at(address, self._size)
        return {name: struct.unpack_from(fmt, raw, offset)[0] for name, fmt, offset in self._fields}

    def _id_text(self, fault: dict[str, int]) -> str:
        token, slot = divmod(fault["entry"], self._num_topk)
        where = "" if fault["peer"] == self._rank else f" on rank {fault['peer']}"
        return (
            f"topk_idx[{token}, {slot}] = {fault['seen']}{where}, but num_experts = {self._num_experts} (valid: -1 or 0..{self._num_experts - 1}); "
            "an earlier call had it: its results for that token are NaN"
        )

    def _phase(self, tag: int) -> str:
        phase, detail = tag & ((1 << self._detail_shift) - 1), tag >> self._detail_shift
        name = self._phases[phase].replace("_", " ") if phase < len(self._phases) else f"phase {phase}"
        return f"{name} (detail {detail})" if detail else name

    def _peer_text(self, fault: dict[str, int]) -> str:
        rank, peer, phase = fault["rank"], fault["peer"], self._phase(fault["tag"])
        text = {
            "late_peer": f"rank {rank} waited {self._timeout_s:g} s in phase {phase!r} for rank {peer}: barrier {fault['expected']}, rank {peer} has reached "
            f"{fault['seen']}",
            "peer_aborted": f"rank {rank} stopped waiting in phase {phase!r}: rank {peer} gave up at barrier {fault['seen']}; its own error says why",
            "phase_mismatch": f"rank {rank} is in phase {phase!r} of barrier {fault['expected']}, rank {peer} in {self._phase(fault['seen_tag'])!r}: the ranks "
            "made different calls (forward, backward, or a backward with other `needs`)",
        }[self._kind_names[fault["kind"]]]
        return f"{text}. y, dx and dtopk_weights since are NaN, weight gradients are of no use, and this buffer cannot be used any more: make a new one on every rank."
