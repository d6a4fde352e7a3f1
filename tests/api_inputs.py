"""Inputs of one Mega MoE call, the plain formula that autograd differentiates, and a look into a backend; shared by the API's tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import torch

import deep_gemm

E, K, H, I, T = 6, 3, 10, 7, 23


@dataclass
class Inputs:
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    w13: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    w2: torch.Tensor
    b13: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None
    b2: torch.Tensor | None = None

    @property
    def args(self) -> tuple:
        return self.x, self.topk_idx, self.topk_weights, self.w13, self.w2

    @property
    def biases(self) -> dict:
        return {} if self.b2 is None else {"b13": self.b13, "b2": self.b2}

    def trainable(self, names: tuple[str, ...] = ("x", "topk_weights", "w13", "w2", "b13", "b2")) -> Inputs:
        """Fresh leaves; those in `names` require gradients."""

        def leaf(name: str, value):
            if isinstance(value, tuple):
                return tuple(leaf(name, part) for part in value)
            return None if value is None else value.detach().clone().requires_grad_(name in names)

        return replace(self, **{name: leaf(name, getattr(self, name)) for name in ("x", "topk_weights", "w13", "w2", "b13", "b2")})

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """By name; a pair's are stacked as the one tensor's would be."""
        out = {}
        for name in ("x", "topk_weights", "w13", "w2", "b13", "b2"):
            value = getattr(self, name)
            if value is not None:
                out[name] = torch.cat([part.grad for part in value], 1) if isinstance(value, tuple) else value.grad
        return out


def make_inputs(*, tokens=T, topk=K, dtype=torch.float64, bias=False, pair=False, seed=0, holes=True) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    topk_idx = torch.rand(tokens, E, generator=generator).topk(topk, dim=1).indices if topk <= E else torch.randint(E, (tokens, topk), generator=generator)
    if holes:
        topk_idx = topk_idx.masked_fill(torch.rand(tokens, topk, generator=generator) < 0.2, -1)
    weights = torch.rand(tokens, topk, generator=generator, dtype=torch.float64).to(torch.float64 if dtype == torch.float64 else torch.float32)
    w13, b13 = normal(E, 2 * I, H) * 0.5, normal(E, 2 * I) if bias else None
    if pair:
        w13, b13 = (None if value is None else tuple(part.contiguous() for part in value.chunk(2, 1)) for value in (w13, b13))
    return Inputs(normal(tokens, H), topk_idx, weights, w13, normal(E, H, I) * 0.5, b13, normal(E, H) if bias else None)


def make_buffer(*, group=None, tokens=T, topk=K, **options) -> deep_gemm.MegaMoeBuffer:
    return deep_gemm.get_symm_buffer_for_mega_moe(group, E, tokens, topk, H, I, device="cpu", **options)


def plain_moe(inputs: Inputs, *, alpha=1.0, up_offset=0.0, clamp=float("inf")) -> torch.Tensor:
    """The formula, one gathered weight per (token, slot): nothing in common with the library."""
    stacked = [torch.cat(value, 1) if isinstance(value, tuple) else value for value in (inputs.w13, inputs.b13)]
    expert = inputs.topk_idx.clamp(min=0)
    z = torch.einsum("th,tkih->tki", inputs.x, stacked[0][expert])
    if stacked[1] is not None:
        z = z + stacked[1][expert]
    gate, up = z.chunk(2, -1)
    gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    out = torch.einsum("tki,tkhi->tkh", gate * torch.sigmoid(alpha * gate) * (up + up_offset), inputs.w2[expert])
    if inputs.b2 is not None:
        out = out + inputs.b2[expert]
    p = inputs.topk_weights.masked_fill(inputs.topk_idx < 0, 0)
    return (p[..., None] * out).sum(1)


def count_calls(monkeypatch, buffer: deep_gemm.MegaMoeBuffer, name: str = "reference") -> Counter:
    """How often the buffer's backend runs each of its steps, from now on."""
    backend, calls = buffer.backend(name), Counter()
    for step in ("gemm1", "gemm2", "backward"):
        monkeypatch.setattr(backend, step, partial(_counted, calls, step, getattr(backend, step)))
    return calls


def _counted(calls: Counter, step: str, run, *args):
    calls[step] += 1
    return run(*args)
