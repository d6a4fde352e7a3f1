"""The program that `compute-sanitizer` watches: one small Mega MoE with every option at R = 1 or virtual R ranks, and with it the public GEMMs at odd
sizes (backend "cuda") or forward calls alone (backend "fused": its backward is the other's). `python tests/gpu/sanitizer_case.py R [backend]`;
results are checked elsewhere, here each kernel only has to run, and no wait may fail.

Not a test module: `scripts/gpu_suite.py` runs it under memcheck, racecheck and synccheck.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ["DG_TIMEOUT_S"] = "60"  # under the tool a kernel takes far longer, and so do the waits for it

import torch

import deep_gemm
from deep_gemm.testing import generators
from deep_gemm.testing.virtual import VirtualGroup

HIDDEN, WIDTH = 256, 128


class Sizes(NamedTuple):
    """experts: of a rank; tokens: of the ranks, in turn; routings: at capacity_factor 1.25, and at 0.25."""

    experts: int
    topk: int
    bound: int
    tokens: tuple[int, ...]
    routings: tuple[str, str]

    @classmethod
    def of(cls, backend: str, num_ranks: int) -> Sizes:
        if backend == "fused":  # one launch does all the work: fewer experts, so that few rows fill several rounds
            return cls(2, 2, 300, (300, 150), ("holes", "one-hot-rank"))
        return cls(16 // num_ranks, 4, 256, (150, 0, 77, 1), ("holes", "holes"))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)


class Rank:
    """Inputs of one rank."""

    def __init__(self, rank: int, num_ranks: int, sizes: Sizes, routing: str):
        local, tokens, experts = sizes.experts, sizes.tokens[rank % len(sizes.tokens)], sizes.experts * num_ranks
        self.x, self.dy = normal(tokens, HIDDEN, seed=rank), normal(tokens, HIDDEN, seed=100 + rank)
        self.idx, self.weights = generators.routing(routing, tokens, experts, sizes.topk, num_ranks=num_ranks, rank=rank, device="cuda")
        self.w13, self.w2 = normal(local, 2 * WIDTH, HIDDEN, seed=200 + rank), normal(local, HIDDEN, WIDTH, seed=300 + rank)
        self.b13, self.b2 = normal(local, 2 * WIDTH, seed=400 + rank), normal(local, HIDDEN, seed=500 + rank)

    def step(self, buffer, save: str, wgrad_dtype: torch.dtype) -> None:
        inputs = (self.x, self.idx, self.weights, self.w13, self.w2, buffer)
        _, state = deep_gemm.mega_moe_fwd(*inputs, save=save, b13=self.b13, b2=self.b2, activation="swiglu_oai")
        if buffer.backend_name == "cuda":
            deep_gemm.mega_moe_bwd(self.dy, state, wgrad_dtype=wgrad_dtype)


def step_all(group: VirtualGroup | None, ranks: list[Rank], buffers: list, save: str, wgrad_dtype: torch.dtype) -> None:
    torch.cuda.synchronize()
    if group:
        group.run(lambda r: ranks[r].step(buffers[r], save, wgrad_dtype))
    else:
        ranks[0].step(buffers[0], save, wgrad_dtype)
    torch.cuda.synchronize()
    for buffer in buffers:
        buffer.check()


def mega_moe(num_ranks: int, backend: str = "cuda") -> None:
    group, sizes = VirtualGroup(num_ranks, reserve_bytes=64 << 20) if num_ranks > 1 else None, Sizes.of(backend, num_ranks)
    # One round, and memory for several.
    for capacity_factor, routing, wgrad_dtype in zip((1.25, 0.25), sizes.routings, (torch.float32, torch.bfloat16), strict=True):
        ranks = [Rank(rank, num_ranks, sizes, routing) for rank in range(num_ranks)]
        arguments = (sizes.experts * num_ranks, sizes.bound, sizes.topk, HIDDEN, WIDTH)
        options = {"device": "cuda", "capacity_factor": capacity_factor, "backend": backend}
        buffers = [deep_gemm.get_symm_buffer_for_mega_moe(group and group.rank(r), *arguments, **options) for r in range(num_ranks)]
        for save in ("recompute", "preact"):
            step_all(group, ranks, buffers, save, wgrad_dtype)
        print(f"R = {num_ranks}, backend {backend}, capacity_factor = {capacity_factor}: ran", flush=True)


def gemms() -> None:
    f32, bf16 = {"device": "cuda"}, {"device": "cuda", "dtype": torch.bfloat16}
    deep_gemm.bf16_gemm_nt(normal(300, 264), normal(200, 264), torch.empty(300, 200, **bf16))
    deep_gemm.bf16_gemm_tn(normal(72, 136), normal(72, 200), torch.empty(136, 200, **f32))
    rows = torch.tensor([0, 1, 64, 100], device="cuda", dtype=torch.int32)
    deep_gemm.m_grouped_bf16_gemm_nt_masked(normal(4, 100, 128), normal(4, 96, 128), torch.empty(4, 100, 96, **bf16), rows, 32)
    sizes = torch.tensor([0, 7, 65, 73], device="cuda", dtype=torch.int32)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(normal(145, 136), normal(145, 72), torch.empty(4, 136, 72, **f32), None, sizes)
    torch.cuda.synchronize()
    print("GEMMs: ran", flush=True)


if __name__ == "__main__":
    mega_moe(int(sys.argv[1]), *sys.argv[2:])
    if "fused" not in sys.argv:
        gemms()
