"""The GEMM problems that scripts/bench/gemm.py times and scripts/bench/tune_gemm.py tunes: operands, our call, the competitors' calls.

Rows of the grouped problems are what one rank of `num_ranks` receives under uniform routing. Operands are random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

import deep_gemm
from deep_gemm import gemm_launch
from deep_gemm.testing import MODEL_SHAPES, generators

ALIGNMENT = 128
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Contest:
    """One problem, solved by several systems into outputs that exist already (torch._grouped_mm allocates its own).

    systems   by name of results/ ("gemm" is ours); each returns its result
    checked   the results are comparable: the same numbers are expected of all
    """

    name: str
    flops: float
    systems: dict[str, Callable[[], torch.Tensor]]
    checked: bool = True
    weight_bytes: int = 0  # of problems that are limited by memory


@dataclass(frozen=True)
class Groups:
    """Rows of one rank: group sizes, their begins aligned to 128, exclusive ends."""

    sizes: list[int]
    ends: torch.Tensor
    num_rows: int
    used: torch.Tensor = field(repr=False)  # bool [num_rows, 1]: rows that have a group

    @classmethod
    def of(cls, sizes: list[int]) -> Groups:
        ends, begin, used = [], 0, []
        for size in sizes:
            ends.append(begin + size)
            aligned = -(-size // ALIGNMENT) * ALIGNMENT
            used += [True] * size + [False] * (aligned - size)
            begin += aligned
        return cls(sizes, torch.tensor(ends, dtype=torch.int32, device="cuda"), begin, torch.tensor(used, device="cuda").unsqueeze(1))

    @classmethod
    def uniform(cls, shape: generators.ModelShape, tokens: int, num_ranks: int) -> Groups:
        idx = [
            generators.routing("uniform", tokens, shape.num_experts, shape.num_topk, num_ranks=num_ranks, rank=r)[0]
            for r in range(num_ranks)
        ]
        sizes = torch.bincount(torch.cat(idx).flatten(), minlength=shape.num_experts)[: shape.num_experts // num_ranks]
        return cls.of(sizes.tolist())

    @property
    def aligned_ends(self) -> torch.Tensor:
        """What torch takes: groups without gaps, padding rows counted in (they are zero)."""
        return ((self.ends + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).int()

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def rows(self, width: int, seed: int) -> torch.Tensor:
        """[num_rows, width], zero in padding rows."""
        return generators.rows(self.num_rows, width, seed=seed, device="cuda").mul_(self.used)


def m_grouped(name: str, groups: Groups, weight: torch.Tensor, order: str) -> Contest:
    """weight [G, n, k] for `nt`, [G, k, n] for `nn`."""
    k, n = (weight.shape[2], weight.shape[1]) if order == "nt" else (weight.shape[1], weight.shape[2])
    a, d, offsets = groups.rows(k, 1), torch.zeros(groups.num_rows, n, dtype=BF16, device="cuda"), groups.aligned_ends
    transposed = weight.transpose(1, 2) if order == "nt" else weight

    def ours() -> torch.Tensor:
        gemm_launch.launch_m_grouped(a, weight, d, groups.ends, b_major="k" if order == "nt" else "mn")
        return d

    systems = {"gemm": ours, "torch": lambda: torch._grouped_mm(a, transposed, offs=offsets)} | quack_m_grouped(a, transposed, offsets)
    return Contest(name, 2.0 * groups.total * n * k, systems, weight_bytes=weight.nbytes)


def k_grouped(name: str, groups: Groups, m: int, n: int, accumulate: bool) -> Contest:
    """BF16 stored, or FP32 accumulated in place (torch, which cannot, stores BF16)."""
    a, b, offsets = groups.rows(m, 1), groups.rows(n, 2), groups.aligned_ends
    d = torch.zeros(len(groups.sizes), m, n, dtype=torch.float32 if accumulate else BF16, device="cuda")

    def ours() -> torch.Tensor:
        gemm_launch.launch_k_grouped(a, b, d, groups.ends, accumulate=accumulate)
        return d

    systems = {"gemm": ours, "torch": lambda: torch._grouped_mm(a.t(), b, offs=offsets)} | quack_k_grouped(a, b, offsets)
    return Contest(name, 2.0 * groups.total * m * n, systems, checked=not accumulate)


def swiglu(name: str, groups: Groups, w13: torch.Tensor, save_z: bool) -> Contest:
    """GEMM 1 + SwiGLU against GEMM 1 alone, both ours; and with x gathered against a copy of its rows first."""
    width, hidden = w13.shape[1] // 2, w13.shape[2]
    x = groups.rows(hidden, 1)
    z, a = (torch.zeros(groups.num_rows, columns, dtype=BF16, device="cuda") for columns in (2 * width, width))
    gate = gemm_launch.Gate(1.0, 0.0, float("inf"))

    def plain() -> torch.Tensor:
        gemm_launch.launch_m_grouped(x, w13, z, groups.ends, b_major="k")
        return z

    def fused() -> torch.Tensor:
        gemm_launch.launch_swiglu(x, w13[:, :width], w13[:, width:], a, groups.ends, gate, z=z if save_z else None)
        return a

    return Contest(name, 4.0 * groups.total * width * hidden, {"gemm": plain, "gemm+swiglu": fused}, checked=False)


def gathered(name: str, groups: Groups, w13: torch.Tensor, tokens: int) -> Contest:
    """GEMM 1 + SwiGLU with x gathered, against copying its rows together first."""
    width, hidden = w13.shape[1] // 2, w13.shape[2]
    source = generators.rows(tokens, hidden, seed=1, device="cuda")
    rows = torch.randint(0, tokens, (groups.num_rows,), dtype=torch.int32, device="cuda")
    index, pool = rows.long(), torch.empty(groups.num_rows, hidden, dtype=BF16, device="cuda")
    a = torch.zeros(groups.num_rows, width, dtype=BF16, device="cuda")
    gate = gemm_launch.Gate(1.0, 0.0, float("inf"))

    def copied() -> torch.Tensor:
        torch.index_select(source, 0, index, out=pool)
        gemm_launch.launch_swiglu(pool, w13[:, :width], w13[:, width:], a, groups.ends, gate)
        return a

    def gather() -> torch.Tensor:
        gemm_launch.launch_swiglu(source, w13[:, :width], w13[:, width:], a, groups.ends, gate, rows=rows)
        return a

    return Contest(name, 4.0 * groups.total * width * hidden, {"copy+gemm": copied, "gemm+gather": gather}, checked=False)


def dswiglu(name: str, groups: Groups, w2: torch.Tensor) -> Contest:
    """dgrad 2 + dSwiGLU against dgrad 2 alone, both ours."""
    hidden, width = w2.shape[1], w2.shape[2]
    dy, z = groups.rows(hidden, 1), groups.rows(2 * width, 2)
    dz, act = torch.zeros_like(z), torch.zeros(groups.num_rows, width, dtype=BF16, device="cuda")
    weight = torch.rand(groups.num_rows, device="cuda")
    row_dp = torch.zeros(gemm_launch.dp_parts(width), groups.num_rows, device="cuda")
    gate = gemm_launch.Gate(1.0, 0.0, float("inf"), row_weight=weight.data_ptr(), row_weight_stride=weight.element_size())

    def plain() -> torch.Tensor:
        gemm_launch.launch_m_grouped(dy, w2, act, groups.ends, b_major="mn")
        return act

    def fused() -> torch.Tensor:
        gemm_launch.launch_dswiglu(dy, w2, z, dz, act, row_dp, groups.ends, gate)
        return weight  # keeps it alive

    return Contest(name, 2.0 * groups.total * width * hidden, {"gemm": plain, "gemm+dswiglu": fused}, checked=False)


def plain_layer(name: str, tokens: int, num_ranks: int) -> Iterator[Contest]:
    """The six GEMMs of a layer, made one at a time: together they would not fit for the largest model."""
    shape = MODEL_SHAPES[name]
    groups, hidden, width = Groups.uniform(shape, tokens, num_ranks), shape.hidden, shape.intermediate_hidden
    w13, w2 = generators.expert_weights(range(shape.num_experts // num_ranks), hidden, width, device="cuda")
    label = f"{name}/{{}}/EP{num_ranks}/bf16"
    yield m_grouped(label.format("gemm1"), groups, w13, "nt")
    yield m_grouped(label.format("gemm2"), groups, w2, "nt")
    yield m_grouped(label.format("dgrad2"), groups, w2, "nn")
    yield m_grouped(label.format("dgrad1"), groups, w13, "nn")
    del w13, w2
    yield k_grouped(label.format("wgrad1"), groups, 2 * width, hidden, accumulate=False)
    yield k_grouped(label.format("wgrad2"), groups, hidden, width, accumulate=False)


def accumulating_layer(name: str, tokens: int, num_ranks: int) -> Iterator[Contest]:
    shape = MODEL_SHAPES[name]
    groups, hidden, width = Groups.uniform(shape, tokens, num_ranks), shape.hidden, shape.intermediate_hidden
    yield k_grouped(f"{name}/wgrad1/EP{num_ranks}/fp32-accumulate", groups, 2 * width, hidden, accumulate=True)
    yield k_grouped(f"{name}/wgrad2/EP{num_ranks}/fp32-accumulate", groups, hidden, width, accumulate=True)


def fused_layer(name: str, tokens: int, num_ranks: int) -> Iterator[Contest]:
    shape = MODEL_SHAPES[name]
    groups = Groups.uniform(shape, tokens, num_ranks)
    w13, w2 = generators.expert_weights(range(shape.num_experts // num_ranks), shape.hidden, shape.intermediate_hidden, device="cuda")
    label = f"{name}/{{}}/EP{num_ranks}/bf16"
    yield swiglu(label.format("gemm1+swiglu"), groups, w13, save_z=False)
    yield swiglu(label.format("gemm1+swiglu+z"), groups, w13, save_z=True)
    yield gathered(label.format("gemm1+gather"), groups, w13, tokens)
    yield dswiglu(label.format("dgrad2+dswiglu"), groups, w2)


# m, n, k: a large square, and the linear layers of DeepSeek-V3 at 4096 tokens
DENSE = [(8192, 8192, 8192)] + [
    (4096, n, k) for n, k in ((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
]


def dense(m: int, n: int, k: int) -> Contest:
    a, b = generators.rows(m, k, seed=1, device="cuda"), generators.rows(n, k, seed=2, device="cuda")
    d, d_torch = (torch.empty(m, n, dtype=BF16, device="cuda") for _ in range(2))

    def ours() -> torch.Tensor:
        deep_gemm.bf16_gemm_nt(a, b, d)
        return d

    return Contest(f"dense/{m}x{n}x{k}/bf16", 2.0 * m * n * k, {"gemm": ours, "torch": lambda: torch.matmul(a, b.t(), out=d_torch)})


def small_groups(num_groups: int = 64) -> Iterator[Contest]:
    """Few rows per group of Qwen3-30B's GEMM 1 and GEMM 2: limited by the memory that the weights come from."""
    shape = MODEL_SHAPES["qwen3-30b"]
    w13, w2 = generators.expert_weights(range(num_groups), shape.hidden, shape.intermediate_hidden, device="cuda")
    for rows in (1, 16, 64, 100):
        groups = Groups.of([rows] * num_groups)
        yield m_grouped(f"qwen3-30b/gemm1/{num_groups}x{rows}rows/bf16", groups, w13, "nt")
        yield m_grouped(f"qwen3-30b/gemm2/{num_groups}x{rows}rows/bf16", groups, w2, "nt")


# ---- a peer that may be there ------------------------------------------------------------------------------------------------------


def _quack() -> Callable | None:
    try:
        from quack.gemm_interface import gemm
    except (ImportError, OSError, RuntimeError):  # not installed, or not for this machine
        return None
    return gemm


def _with_begin(offsets: torch.Tensor) -> torch.Tensor:
    return torch.cat([offsets.new_zeros(1), offsets])


def quack_m_grouped(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    gemm, bounds = _quack(), _with_begin(offsets)
    return {} if gemm is None else {"quack": lambda: gemm(a, b, cu_seqlens_m=bounds, tuned=False)}


def quack_k_grouped(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    gemm, bounds = _quack(), _with_begin(offsets)
    return {} if gemm is None else {"quack": lambda: gemm(a.t(), b, cu_seqlens_k=bounds, tuned=False)}
