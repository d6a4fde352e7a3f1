"""A Qwen3-style decoder: RMSNorm, grouped-query attention with RoPE and QK-norm, softmax router, experts through `deep_gemm.nn.MegaMoE`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class ModelConfig:
    """hidden and intermediate_hidden are multiples of 128, as the CUDA kernels want."""

    vocabulary: int = 256  # bytes
    num_layers: int = 2
    hidden: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_topk: int = 2
    intermediate_hidden: int = 128
    rope_theta: float = 10_000.0


class RMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), 1e-6).to(x.dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def _rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary position embedding of x [B, heads, S, D]: pairs (i, i + D/2) turned by position * theta^(-2i/D)."""
    length, half = x.shape[2], x.shape[3] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.q = _linear(config.hidden, config.num_heads * config.head_dim)
        self.k = _linear(config.hidden, config.num_kv_heads * config.head_dim)
        self.v = _linear(config.hidden, config.num_kv_heads * config.head_dim)
        self.out = _linear(config.num_heads * config.head_dim, config.hidden)
        self.q_norm, self.k_norm = RMSNorm(config.head_dim), RMSNorm(config.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, -1, self.config.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = _rotate(self.q_norm(q), self.config.rope_theta), _rotate(self.k_norm(k), self.config.rope_theta)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Router(nn.Module):
    """Softmax over the experts in FP32, the K best, their weights scaled to sum 1."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.num_topk = config.num_topk
        self.gate = _linear(config.hidden, config.num_experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, experts = F.linear(x.float(), self.gate.weight.float()).softmax(-1).topk(self.num_topk, -1)
        return experts, weights / weights.sum(-1, keepdim=True)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, experts: nn.Module):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config.hidden), Attention(config)
        self.moe_norm, self.router, self.experts = RMSNorm(config.hidden), Router(config), experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        tokens = self.moe_norm(x).flatten(0, 1)
        return x + self.experts(tokens, *self.router(tokens)).view_as(x)


class LanguageModel(nn.Module):
    """make_experts() gives the expert module of a layer: called as module(x [T, H], topk_idx [T, K], topk_weights [T, K]) -> [T, H]."""

    def __init__(self, config: ModelConfig, make_experts: Callable[[], nn.Module]):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        nn.init.normal_(self.embedding.weight)
        self.blocks = nn.ModuleList(Block(config, make_experts()) for _ in range(config.num_layers))
        self.norm, self.head = RMSNorm(config.hidden), _linear(config.hidden, config.vocabulary)
        # A small head starts the loss at ln(vocabulary), the loss of knowing nothing.
        nn.init.normal_(self.head.weight, std=0.1 * config.hidden**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, S, vocabulary] FP32 of tokens [B, S] int64."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats per byte of windows [B, S + 1]: each byte predicted from those before it."""
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
