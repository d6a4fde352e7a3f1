"""Where everything lies in a rank's symmetric memory and scratch. The tables are C (layout/mega_moe_layout.h); here they get names and tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deep_gemm import _C

if TYPE_CHECKING:
    from deep_gemm.mega.buffer import MegaMoeBuffer, MegaMoeSettings

STATE_REGIONS = frozenset({"signals", "control", "grid"})
"""Regions that outlive a call; all others hold nothing between calls."""


@dataclass(frozen=True)
class Layout:
    """Offsets and sizes in bytes by region name; capacity_rows is C, the pool rows of one round; rounds is what every call launches."""

    symm: dict[str, tuple[int, int]]
    scratch: dict[str, tuple[int, int]]
    symm_bytes: int
    scratch_bytes: int
    capacity_rows: int
    worst_rows: int
    rounds: int
    route_smem_bytes: int


def layout_of(settings: MegaMoeSettings) -> Layout:
    """The layout for these settings; ValueError names the one that the CUDA path cannot serve."""
    return _layout(
        settings.num_experts,
        settings.num_ranks,
        settings.num_topk,
        settings.hidden,
        settings.intermediate_hidden,
        settings.num_max_tokens_per_rank,
        settings.capacity_factor,
    )


@lru_cache(maxsize=64)
def _layout(
    num_experts: int, num_ranks: int, num_topk: int, hidden: int, intermediate: int, max_tokens: int, capacity_factor: float
) -> Layout:
    expected_rows = max(1, math.ceil(capacity_factor * max_tokens * num_topk))
    made = _C.mega_moe_layout(num_experts, num_ranks, num_topk, hidden, intermediate, max_tokens, expected_rows)
    if made["worst_rows"] >= 2**31 - made["capacity_rows"]:  # a window's end must fit too
        raise ValueError(
            f"num_max_tokens_per_rank = {max_tokens}: {num_ranks} ranks with num_topk = {num_topk} make up to {made['worst_rows']} rows on one rank; expected "
            f"fewer than 2^31 - {made['capacity_rows']}, row numbers are 32-bit"
        )
    symm, scratch = ({name: (offset, nbytes) for name, offset, nbytes in made.pop(kind)} for kind in ("symm", "scratch"))
    return Layout(symm=symm, scratch=scratch, **made)


class Regions:
    """The memory of one rank: addresses for kernels, tensors for the GEMMs.

    rows [2, C, H] BF16, dx_sum [C, H] FP32 (the same memory), z [C, 2I], act [C, I] BF16, group_ends [E_l] int32,
    carry13 [2, 2I, H], carry2 [2, H, I] FP32 (None when there is one round), bias_sums13 [E_l, 2I], bias_sums2 [E_l, H] FP32
    """

    def __init__(self, buffer: MegaMoeBuffer, layout: Layout):
        self._layout = layout
        self._symm, self.peers, self.rank = buffer.symm.tensor, list(buffer.symm.addresses), buffer.rank
        self._scratch = torch.zeros(layout.scratch_bytes, dtype=torch.uint8, device=buffer.device)
        self.nbytes = layout.scratch_bytes
        rows, hidden, width, experts = layout.capacity_rows, buffer.hidden, buffer.intermediate_hidden, buffer.num_local_experts
        bf16, f32 = torch.bfloat16, torch.float32
        self.rows = self._view("rows", bf16, 2, rows, hidden)
        self.dx_sum = self._view("rows", f32, rows, hidden)
        self.z = self._view("z", bf16, rows, 2 * width)
        self.act = self._view("act", bf16, rows, width)
        self.group_ends = self._view("group_ends", torch.int32, experts)
        several = layout.rounds > 1
        self.carry13 = self._view("carry13", f32, 2, 2 * width, hidden) if several else None
        self.carry2 = self._view("carry2", f32, 2, hidden, width) if several else None
        sums = self._view("bias_sums", f32, experts * (2 * width + hidden))
        self.bias_sums13, self.bias_sums2 = (
            sums[: experts * 2 * width].view(experts, 2 * width),
            sums[experts * 2 * width :].view(experts, hidden),
        )

    def _view(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        offset, nbytes = self._layout.scratch[name]
        return self._scratch[offset : offset + nbytes].view(dtype)[: math.prod(shape)].view(shape)

    def scratch(self, name: str) -> int:
        """Device address of a scratch region."""
        return self._scratch.data_ptr() + self._layout.scratch[name][0]

    def own(self, name: str) -> int:
        """Device address of a symmetric region in this rank's slab."""
        return self.peers[self.rank] + self._layout.symm[name][0]

    def offset(self, name: str) -> int:
        """Offset of a symmetric region in every slab."""
        return self._layout.symm[name][0]

    def poison(self) -> None:
        """Sets every byte of the regions that must hold nothing between calls: NaN as BF16 and FP32, -1 as an integer. For tests."""
        for memory, regions in ((self._symm, self._layout.symm), (self._scratch, self._layout.scratch)):
            for name, (offset, nbytes) in regions.items():
                if name not in STATE_REGIONS:
                    memory[offset : offset + nbytes].fill_(0xFF)
