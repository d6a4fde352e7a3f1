"""The program that `compute-sanitizer` watches: one small Mega MoE with every option at R = 1 or virtual R ranks, and the public GEMMs at odd
sizes. `python tests/gpu/sanitizer_case.py R`; results are checked elsewhere, here each kernel only has to run.

Not a test module: `scripts/gpu_suite.py` runs it under memcheck, racecheck and synccheck.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

import deep_gemm
from deep_gemm.testing import generators
from deep_gemm.testing.virtual import VirtualGroup

HIDDEN, WIDTH, EXPERTS, TOPK, BOUND = 256, 128, 16, 4, 256
TOKENS = (150, 0, 77, 1)  # of the ranks: many, none, some, one


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(torch.bfloat16)


class Rank:
    """Inputs of one rank."""

    def __init__(self, rank: int, num_ranks: int):
        local, tokens = EXPERTS // num_ranks, TOKENS[rank % len(TOKENS)]
        self.x, self.dy = normal(tokens, HIDDEN, seed=rank), normal(tokens, HIDDEN, seed=100 + rank)
        self.idx, self.weights = generators.routing("holes", tokens, EXPERTS, TOPK, num_ranks=num_ranks, rank=rank, device="cuda")
        self.w13, self.w2 = normal(local, 2 * WIDTH, HIDDEN, seed=200 + rank), normal(local, HIDDEN, WIDTH, seed=300 + rank)
        self.b13, self.b2 = normal(local, 2 * WIDTH, seed=400 + rank), normal(local, HIDDEN, seed=500 + rank)

    def step(self, buffer, save: str, wgrad_dtype: torch.dtype) -> None:
        inputs = (self.x, self.idx, self.weights, self.w13, self.w2, buffer)
        _, state = deep_gemm.mega_moe_fwd(*inputs, save=save, b13=self.b13, b2=self.b2, activation="swiglu_oai")
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


def mega_moe(num_ranks: int) -> None:
    group = VirtualGroup(num_ranks, reserve_bytes=64 << 20) if num_ranks > 1 else None
    ranks = [Rank(rank, num_ranks) for rank in range(num_ranks)]
    for capacity_factor, wgrad_dtype in ((1.25, torch.float32), (0.25, torch.bfloat16)):  # one round, and several with a carry
        sizes = (EXPERTS, BOUND, TOPK, HIDDEN, WIDTH)
        buffers = [
            deep_gemm.get_symm_buffer_for_mega_moe(group and group.rank(r), *sizes, device="cuda", capacity_factor=capacity_factor)
            for r in range(num_ranks)
        ]
        for save in ("recompute", "preact"):
            step_all(group, ranks, buffers, save, wgrad_dtype)
        print(f"R = {num_ranks}, capacity_factor = {capacity_factor}: ran", flush=True)


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
    mega_moe(int(sys.argv[1]))
    gemms()
