"""What the tests of the GEMM share: inputs, group layouts, bounds, a tile of one's choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_gemm import gemm_launch, jit
from deep_gemm.gemm_config import TILES, GemmConfig

ALIGNMENT = 128
BF16, F32 = torch.bfloat16, torch.float32
NAN = float("nan")
UNTOUCHED = 7.0  # what memory holds that must not be written

# A BF16 result is off by 1.7e-3 from its own rounding.
BOUNDS = {BF16: {"rel_frobenius": 5e-3, "diff": 1e-5, "max_row_rel": 1e-2}, F32: {"rel_frobenius": 1e-4, "diff": 1e-8}}


def normal(*shape: int, seed: int = 0, scale: float = 1.0, device: torch.device | str = "cuda") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=device, dtype=F32) * scale).to(BF16)


def aligned(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Groups:
    """Groups of rows, each beginning at a multiple of the alignment; `spare` rows follow the last."""

    sizes: list[int]
    device: torch.device | str = "cuda"
    spare: int = 256

    @property
    def begins(self) -> list[int]:
        return [sum(map(aligned, self.sizes[:group])) for group in range(len(self.sizes))]

    @property
    def slices(self) -> list[slice]:
        return [slice(begin, begin + size) for begin, size in zip(self.begins, self.sizes, strict=True)]

    @property
    def num_rows(self) -> int:
        return sum(map(aligned, self.sizes)) + self.spare

    @property
    def ends(self) -> torch.Tensor:
        return torch.tensor([rows.stop for rows in self.slices], dtype=torch.int32, device=self.device)

    @property
    def index(self) -> torch.Tensor:
        """The group of every row, -1 for none."""
        index = torch.full((self.num_rows,), -1, dtype=torch.int32)
        for group, rows in enumerate(self.slices):
            index[rows] = group
        return index.to(self.device)

    @property
    def used(self) -> torch.Tensor:
        return self.index >= 0

    def rows(self, width: int, seed: int) -> torch.Tensor:
        """[num_rows, width], NaN in rows of no group."""
        made = normal(self.num_rows, width, seed=seed, device=self.device)
        made[~self.used] = NAN
        return made

    def windows(self, capacity: int) -> list[tuple[int, int]]:
        """All that hold rows, and one after them."""
        return [(begin, begin + capacity) for begin in range(0, self.num_rows - self.spare + capacity, capacity)]


def contiguous_layout(sizes: list[int], spare: int = 256) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(index form [M], psum form [G], bool [M] of rows that have a group); `spare` rows follow the last group."""
    groups = Groups(sizes, spare=spare)
    return groups.index, groups.ends, groups.used


class ForcedTile:
    """`choose_config` with one tile for every problem, gathered ones too. `chosen` tells that the launches asked it."""

    def __init__(self, name: str):
        self.tile = TILES[name]
        self.chosen: list[GemmConfig] = []

    def __call__(self, kind, a_major, b_major, d_dtype, m, n, k, num_sms, epilogue="store", gather="none") -> GemmConfig:
        self.chosen.append(GemmConfig(kind, a_major, b_major, d_dtype, self.tile, epilogue, gather))
        return self.chosen[-1]


def compile_all(configs: list[GemmConfig]) -> None:
    """By all cores, instead of one after another at the first launches."""
    report = jit.warmup([config.spec() for config in configs])
    assert not report.failures, report.failures


def dp_parts_of(products: torch.Tensor) -> torch.Tensor:
    """[parts, rows]: row sums of [rows, width] over the columns that one partial sum covers each."""
    return torch.stack([part.sum(1) for part in products.split(gemm_launch.DP_COLUMNS, 1)])
