"""Trains one MoE layer with deep_gemm on the CPU for a few steps, and prints what it used as JSON. Exit status 1 if the loss does not fall."""

from __future__ import annotations

import json
import sys

import torch

import deep_gemm

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK, STEPS = 64, 128, 128, 8, 2, 12


def main() -> int:
    torch.manual_seed(0)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, EXPERTS, TOKENS, TOPK, HIDDEN, INTERMEDIATE, device="cpu")
    layer = torch.nn.ParameterDict(
        {
            "router": torch.randn(EXPERTS, HIDDEN) / HIDDEN**0.5,
            "w13": (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5).bfloat16(),
            "w2": (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5).bfloat16(),
        }
    )
    x, target = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randn(TOKENS, HIDDEN)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        topk_weights, topk_idx = (x.float() @ layer["router"].T).softmax(-1).topk(TOPK)
        y = deep_gemm.mega_moe(x, topk_idx, topk_weights, layer["w13"], layer["w2"], buffer)
        loss = torch.nn.functional.mse_loss(y.float(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(json.dumps({"deep_gemm": deep_gemm.__version__, "file": deep_gemm.__file__, "torch": torch.__version__, "losses": losses}))
    return 0 if losses[-1] < 0.9 * losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
