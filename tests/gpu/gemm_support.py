"""What the tests of the GEMM share: inputs, group layouts, bounds, a tile of one's choice."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from deep_gemm import gemm_launch, jit
from deep_gemm.activation import SwiGLU
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


# ---- gated activation --------------------------------------------------------------------------------------------------------------

HIDDEN = 64 * 5  # more k blocks than a ring has stages
GATED_SIZES = [0, 1, 63, 64, 65, 127, 128, 129, 300]


Results = tuple[torch.Tensor, ...]


class GatedCase:
    """Inputs of launch_swiglu and launch_dswiglu, and what they must give by FP64. Rows without a group are NaN, also of z and the weights."""

    def __init__(self, width: int, device, *, activation: SwiGLU, biases: bool, weights: bool, sizes: list[int] = GATED_SIZES):
        count = len(sizes)
        self.activation, self.width, self.groups = activation, width, Groups(sizes, device)
        self.used, self.index = self.groups.used, self.groups.index
        self.x, self.dy, self.z = (self.groups.rows(columns, seed) for seed, columns in enumerate((HIDDEN, HIDDEN, 2 * width)))
        self.w13 = normal(count, 2 * width, HIDDEN, seed=3, scale=HIDDEN**-0.5, device=device)
        self.w2 = normal(count, HIDDEN, width, seed=4, scale=HIDDEN**-0.5, device=device)
        self.b13 = normal(count, 2 * width, seed=5, device=device) if biases else None
        self.meta = self.groups.rows(4, 6).float() if weights else None  # a row's weight is its last word, as in the staged MoE
        if activation.clamp < math.inf and not biases:  # the derivative is that of the inside on the bound
            self.z[:, ::7] = activation.clamp
            self.z[:, 3::7] = -activation.clamp

    def gate(self, first_row: int = 0) -> gemm_launch.Gate:
        """first_row: of a window."""
        constants = (self.activation.alpha, self.activation.up_offset, self.activation.clamp)
        bias, weight = (0, 0, 0), (0, 0)
        if self.b13 is not None:
            bias = self.b13.data_ptr(), self.b13[:, self.width :].data_ptr(), self.b13.stride(0)
        if self.meta is not None:
            weight = self.meta[first_row:, 3].data_ptr(), 4 * self.meta.stride(0)
        return gemm_launch.Gate(*constants, *bias, *weight)

    def windows(self, capacity: int | None) -> list[tuple[tuple[int, int], slice]]:
        """(window, its rows of the tensors)."""
        if capacity is None:
            return [(gemm_launch.NO_WINDOW, slice(self.groups.num_rows))]
        return [(window, slice(*window)) for window in self.groups.windows(capacity)]

    def empty(self, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.full((self.groups.num_rows, columns), UNTOUCHED, dtype=dtype, device=self.x.device)

    def swiglu(self, launches, *, save_z: bool, capacity: int | None = None, source=None, rows=None, num_sms=None) -> Results:
        """(a, z). capacity: of the windows. source, rows: x gathered."""
        a, z = self.empty(self.width), self.empty(2 * self.width)
        halves = self.w13[:, : self.width], self.w13[:, self.width :]
        for window, part in self.windows(capacity):
            x, gate = self.x[part] if rows is None else source, self.gate(part.start or 0)
            options = {"z": z[part] if save_z else None, "rows": None if rows is None else rows[part], "window": window, "num_sms": num_sms}
            launches.launch_swiglu(x, *halves, a[part], self.groups.ends, gate, **options)
        return a, z

    def dswiglu(self, launches, *, over_z: bool = False, capacity: int | None = None, source=None, rows=None, num_sms=None) -> Results:
        """(dz, act, row_dp [rows, parts]). over_z: dz takes the place of z. source, rows: dy gathered."""
        z, act = self.z.clone(), self.empty(self.width)
        dz = z if over_z else self.empty(2 * self.width)
        row_dp = self.empty(gemm_launch.dp_parts(self.width), F32).t().contiguous()
        for window, part in self.windows(capacity):
            dy, gate = self.dy[part] if rows is None else source, self.gate(part.start or 0)
            results, options = (dz[part], act[part], row_dp[:, part]), {"rows": None if rows is None else rows[part], "window": window}
            launches.launch_dswiglu(dy, self.w2, z[part], *results, self.groups.ends, gate, num_sms=num_sms, **options)
        return dz, act, row_dp.t()

    def by_group(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[rows, k] times [G, k, n] of each row's group, FP64."""
        result = torch.zeros(len(rows), weights.shape[2], dtype=torch.float64, device=rows.device)
        for group, part in enumerate(self.groups.slices):
            result[part] = rows[part].double() @ weights[group].double()
        return result

    def activated(self, z: torch.Tensor) -> torch.Tensor:
        """act(z + bias), FP64, of z [rows, 2I]; differentiable."""
        if self.b13 is not None:
            z = z + self.b13.double()[self.index.long().clamp(min=0)]
        gate, up = z.chunk(2, 1)
        gate, up = gate.clamp(max=self.activation.clamp), up.clamp(-self.activation.clamp, self.activation.clamp)
        return gate * torch.sigmoid(self.activation.alpha * gate) * (up + self.activation.up_offset)

    @property
    def weight(self) -> torch.Tensor:
        return torch.ones(len(self.x), 1, device=self.x.device).double() if self.meta is None else self.meta[:, 3:].double()

    def true_z(self) -> torch.Tensor:
        return self.by_group(self.x, self.w13.transpose(1, 2))

    def true_gradients(self) -> Results:
        """(dz, act, products of dA' and a, whose row sums are dp)."""
        da, z = self.by_group(self.dy, self.w2), self.z.double().requires_grad_()
        a = self.activated(z)
        (dz,) = torch.autograd.grad(a, z, self.weight * da)
        return dz, self.weight * a.detach(), da * a.detach()


def dp_parts_of(products: torch.Tensor) -> torch.Tensor:
    """[rows, parts]: row sums of [rows, width] over the columns that one partial sum covers each."""
    return torch.stack([part.sum(1) for part in products.split(gemm_launch.DP_COLUMNS, 1)], 1)
