"""The MoE gradients of the trained model against autograd of the plain formula, which shares no code with the library.

y[t] = sum_k p[t,k] * (silu(x[t] . Wg[e]^T) * (x[t] . Wu[e]^T)) . W2[e]^T,   e = topk_idx[t,k]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from deep_gemm.demo.training import Ranks, Trainer
from deep_gemm.nn import MegaMoE

THRESHOLDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest relative Frobenius error that passes, by the dtype that the experts compute in (a BF16 result is off by 4e-3 to 6e-3)."""


def plain_moe(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The formula above for all experts: x [T, H], w13 [E, 2I, H], w2 [E, H, I], all of one dtype."""
    y = torch.zeros_like(x)
    for expert in range(w2.shape[0]):
        weight = torch.where(topk_idx == expert, topk_weights, 0).sum(1, keepdim=True)
        gate, up = F.linear(x, w13[expert]).chunk(2, -1)
        y = y + weight * F.linear(F.silu(gate) * up, w2[expert])
    return y


def _gather(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The ranks' tensors one after another along dimension 0; as a sum of padded ones, which every backend has for FP32."""
    whole = tensor.new_zeros((ranks.size, *tensor.shape))
    whole[ranks.rank] = tensor
    return ranks.sum_(whole).flatten(0, 1)


def _gradients(layer, leaves: tuple[torch.Tensor, ...], dy: torch.Tensor) -> list[torch.Tensor]:
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    return [gradient.double() for gradient in torch.autograd.grad(layer(*leaves), leaves, dy)]


def _plain_gradients(experts: MegaMoE, inputs: tuple[torch.Tensor, ...], dy: torch.Tensor, ranks: Ranks) -> list[torch.Tensor]:
    """FP64 gradients of x, topk_weights, w13, w2 that belong to this rank, from the tokens and experts of all ranks."""
    x, topk_idx, topk_weights = inputs
    gathered = [_gather(t.detach().float(), ranks).double() for t in (x, topk_weights, experts.w13, experts.w2, dy)]
    ids = _gather(topk_idx.int(), ranks)
    gradients = _gradients(lambda x, p, w13, w2: plain_moe(x, ids, p, w13, w2), tuple(gathered[:4]), gathered[4])
    return [ranks.share(gradient) for gradient in gradients]


def gradient_error(trainer: Trainer) -> tuple[float, float]:
    """(largest relative Frobenius error of dx, dp, dW13, dW2 over all ranks, threshold), for the first MoE layer on held-out text."""
    experts, ranks = trainer.model.blocks[0].experts, trainer.ranks
    x, topk_idx, topk_weights = inputs = trainer.first_moe_inputs()
    generator = torch.Generator().manual_seed(1 + ranks.rank)
    dy = torch.randn(x.shape, generator=generator).to(x)
    leaves = (x.detach().requires_grad_(), topk_weights.detach().requires_grad_(), experts.w13, experts.w2)
    actual = torch.autograd.grad(experts(leaves[0], topk_idx, leaves[1]), leaves, dy)
    truth = _plain_gradients(experts, inputs, dy, ranks)
    errors = torch.stack([(a.double() - t).norm() / t.norm() for a, t in zip(actual, truth, strict=True)])
    # A NaN must not get lost in a maximum over ranks: summed it stays, and one rank's error is bounded by the sum's.
    every = _gather(errors.max().view(1).float(), ranks)
    return every.max().item(), THRESHOLDS[x.dtype]
