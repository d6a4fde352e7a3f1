"""Times the GEMMs of a Mega MoE layer alone, ours against torch._grouped_mm, and one dense GEMM against cuBLASLt (torch.matmul).

    python scripts/bench/gemm.py [--shape qwen3-235b ...] [--ep 2] [--tokens 16384] [--sustained-s 3] [--json results/gemm-h200.json]

Rows are what one rank of `--ep` receives under uniform routing. Operands are random; the L2 is flushed before each single call; the systems
alternate. Each result is checked against torch before it is timed. tflops: 2 * rows * n * k over the median.
Needs deep_gemm installed, or PYTHONPATH=. in the checkout.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import deep_gemm
from deep_gemm.testing import MODEL_SHAPES, assert_close, generators, results, timing

ALIGNMENT = 128
DENSE = 8192


@dataclass(frozen=True)
class Grouped:
    """Rows of one rank: group sizes, their begins aligned to 128, exclusive ends."""

    sizes: torch.Tensor
    ends: torch.Tensor
    num_rows: int

    @classmethod
    def uniform(cls, shape: generators.ModelShape, tokens: int, num_ranks: int) -> Grouped:
        idx = [
            generators.routing("uniform", tokens, shape.num_experts, shape.num_topk, num_ranks=num_ranks, rank=r)[0]
            for r in range(num_ranks)
        ]
        sizes = torch.bincount(torch.cat(idx).flatten(), minlength=shape.num_experts)[: shape.num_experts // num_ranks]
        aligned = (sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        begins = aligned.cumsum(0) - aligned
        return cls(sizes.cuda(), (begins + sizes).int().cuda(), int(aligned.sum()))

    @property
    def aligned_ends(self) -> torch.Tensor:
        """What torch takes: groups without gaps, padding rows counted in (they are zero)."""
        return ((self.ends + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).int()

    def rows(self, width: int, seed: int) -> torch.Tensor:
        """[num_rows, width], zero in padding rows."""
        x = generators.rows(self.num_rows, width, seed=seed, device="cuda")
        used = torch.zeros(self.num_rows, dtype=torch.bool, device="cuda")
        for size, end in zip(self.sizes.tolist(), self.ends.tolist(), strict=True):
            used[end - size : end] = True
        return x.mul_(used.unsqueeze(1))


@dataclass(frozen=True)
class Contest:
    """One GEMM, both ways, into outputs that exist already (torch._grouped_mm allocates its own)."""

    name: str
    flops: float
    ours: Callable[[], torch.Tensor]
    torch: Callable[[], torch.Tensor]


def m_grouped(name: str, groups: Grouped, weight: torch.Tensor, order: str) -> Contest:
    """weight [G, n, k] for `nt`, [G, k, n] for `nn`."""
    k, n = (weight.shape[2], weight.shape[1]) if order == "nt" else (weight.shape[1], weight.shape[2])
    a, d = groups.rows(k, 1), torch.zeros(groups.num_rows, n, dtype=torch.bfloat16, device="cuda")
    call, offsets = getattr(deep_gemm, f"m_grouped_bf16_gemm_{order}_contiguous"), groups.aligned_ends
    transposed = weight.transpose(1, 2) if order == "nt" else weight

    def ours() -> torch.Tensor:
        call(a, weight, d, groups.ends, use_psum_layout=True)
        return d

    return Contest(name, 2.0 * int(groups.sizes.sum()) * n * k, ours, lambda: torch._grouped_mm(a, transposed, offs=offsets))


def k_grouped(name: str, groups: Grouped, m: int, n: int) -> Contest:
    a, b, offsets = groups.rows(m, 1), groups.rows(n, 2), groups.aligned_ends
    d = torch.zeros(len(groups.sizes), m, n, dtype=torch.bfloat16, device="cuda")

    def ours() -> torch.Tensor:
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, None, groups.ends, use_psum_layout=True)
        return d

    return Contest(name, 2.0 * int(groups.sizes.sum()) * m * n, ours, lambda: torch._grouped_mm(a.t(), b, offs=offsets))


def layer_contests(name: str, tokens: int, num_ranks: int):
    """The six GEMMs of a layer, made one at a time: together they would not fit for the largest model."""
    shape = MODEL_SHAPES[name]
    groups, hidden, width = Grouped.uniform(shape, tokens, num_ranks), shape.hidden, shape.intermediate_hidden
    w13, w2 = generators.expert_weights(range(shape.num_experts // num_ranks), hidden, width, device="cuda")
    label = f"{name}/{{}}/EP{num_ranks}/bf16"
    yield m_grouped(label.format("gemm1"), groups, w13, "nt")
    yield m_grouped(label.format("gemm2"), groups, w2, "nt")
    yield m_grouped(label.format("dgrad2"), groups, w2, "nn")
    yield m_grouped(label.format("dgrad1"), groups, w13, "nn")
    del w13, w2
    yield k_grouped(label.format("wgrad1"), groups, 2 * width, hidden)
    yield k_grouped(label.format("wgrad2"), groups, hidden, width)


def dense_contest(size: int) -> Contest:
    a, b = (generators.rows(size, size, seed=s, device="cuda") for s in (1, 2))
    d, d_torch = (torch.empty(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def ours() -> torch.Tensor:
        deep_gemm.bf16_gemm_nt(a, b, d)
        return d

    return Contest(f"dense/{size}x{size}x{size}/bf16", 2.0 * size**3, ours, lambda: torch.matmul(a, b.t(), out=d_torch))


def measure(contest: Contest, sustained_s: float, flush: timing.L2Flush) -> list[dict]:
    assert_close(contest.ours(), contest.torch(), rel_frobenius=5e-3, name=contest.name)
    systems = {"gemm": contest.ours, "torch": contest.torch}
    measured = timing.alternate(systems, before=flush)
    rows = []
    for system, fn in systems.items():
        result = measured[system]
        if sustained_s:
            result = timing.with_sustained(result, timing.sustained_ms(fn, seconds=sustained_s))
        rows.append(results.timing_row(contest.name, system, "gemm", result, flops=contest.flops))
        print(f"{contest.name:40} {system:6} {result.median_ms:8.3f} ms  {rows[-1]['tflops']:6.0f} TFLOP/s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", choices=sorted(MODEL_SHAPES), default=list(MODEL_SHAPES))
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--sustained-s", type=float, default=0.0, help="seconds back to back of each system; 0 = none")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    flush, rows = timing.L2Flush(), []
    rows += measure(dense_contest(DENSE), options.sustained_s, flush)
    for name in options.shape:
        for contest in layer_contests(name, options.tokens, options.ep):
            rows += measure(contest, options.sustained_s, flush)
            del contest
            torch.cuda.empty_cache()
    if options.json:
        results.merge(options.json, rows, key=("case", "system", "direction"))


if __name__ == "__main__":
    main()
