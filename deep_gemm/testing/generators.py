"""Inputs from a seed: the model shapes of the results files, routings, weights.

Routing is drawn on the CPU, so that it is the same on every device; weights are drawn per expert, so that they do not depend on how experts are
spread over ranks. Uniform routing is independent top-k without replacement; the (t*K + k) mod E pattern is not offered, because it sends all
experts of a token to one rank (E=128, K=8, R=8), which no router does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelShape:
    hidden: int
    intermediate_hidden: int
    num_experts: int
    num_topk: int


MODEL_SHAPES = {
    "qwen3-30b": ModelShape(2048, 768, 128, 8),
    "qwen3-235b": ModelShape(4096, 1536, 128, 8),
    "deepseek-v3": ModelShape(7168, 2048, 256, 8),
}


@dataclass(frozen=True)
class _Draw:
    """What a routing is drawn from. `shared` is the same generator state on every rank, `own` differs by rank."""

    num_tokens: int
    num_experts: int
    num_topk: int
    num_ranks: int
    shared: torch.Generator
    own: torch.Generator

    def keys(self) -> torch.Tensor:
        return torch.rand(self.num_tokens, self.num_experts, generator=self.own)

    def best(self, keys: torch.Tensor) -> torch.Tensor:
        """Experts of the K largest keys of each token; -1 where fewer than K keys are finite."""
        if self.num_topk > keys.shape[1]:
            keys = torch.nn.functional.pad(keys, (0, self.num_topk - keys.shape[1]), value=-torch.inf)
        values, experts = keys.topk(self.num_topk, 1)
        return experts.masked_fill(values.isinf(), -1)

    def target_rank(self) -> int:
        return int(torch.randint(self.num_ranks, (), generator=self.shared))

    def owner(self) -> torch.Tensor:
        return torch.arange(self.num_experts) // (self.num_experts // self.num_ranks)


def _uniform(draw: _Draw) -> torch.Tensor:
    return draw.best(draw.keys())


def _zipf1(draw: _Draw) -> torch.Tensor:
    # Largest of log(p) + Gumbel noise, K times, is sampling from p without replacement.
    rank = 1 + torch.randperm(draw.num_experts, generator=draw.shared).double()
    gumbel = -torch.log(-torch.log(draw.keys().double().clamp(1e-12, 1 - 1e-12)))
    return draw.best(gumbel - rank.log())


def _one_hot_rank(draw: _Draw) -> torch.Tensor:
    return draw.best(draw.keys().masked_fill(draw.owner() != draw.target_rank(), -torch.inf))


def _idle_rank(draw: _Draw) -> torch.Tensor:
    return draw.best(draw.keys().masked_fill(draw.owner() == draw.target_rank(), -torch.inf))


def _one_expert(draw: _Draw) -> torch.Tensor:
    expert = int(torch.randint(draw.num_experts, (), generator=draw.shared))
    ids = torch.full((draw.num_tokens, draw.num_topk), -1)
    ids[:, 0] = expert
    return ids


def _holes(draw: _Draw) -> torch.Tensor:
    ids = _uniform(draw)
    return ids.masked_fill(torch.rand(ids.shape, generator=draw.own) < 0.3, -1)


def _all_masked(draw: _Draw) -> torch.Tensor:
    return torch.full((draw.num_tokens, draw.num_topk), -1)


def _repeated(draw: _Draw) -> torch.Tensor:
    return torch.randint(draw.num_experts, (draw.num_tokens, 1), generator=draw.own).expand(-1, draw.num_topk).contiguous()


ROUTINGS: dict[str, Callable[[_Draw], torch.Tensor]] = {
    "uniform": _uniform,  # independent uniform top-k without replacement
    "zipf1": _zipf1,  # Zipf(1.0) over the experts, permuted, without replacement
    "one-hot-rank": _one_hot_rank,  # all tokens to the experts of one rank; slots beyond E_l are -1
    "idle-rank": _idle_rank,  # one rank gets nothing (with one rank: nobody gets anything)
    "one-expert": _one_expert,  # slot 0 of every token to one expert, other slots -1
    "holes": _holes,  # uniform, 30 % of the entries -1
    "all-masked": _all_masked,  # nothing but -1
    "repeated": _repeated,  # every token names one expert K times
}


def routing(
    name: str,
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    *,
    num_ranks: int = 1,
    rank: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.int64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_idx [T, K] in `dtype`, topk_weights [T, K] FP32 with row sum 1 before masking) of tokens of `rank`, by a name of `ROUTINGS`.

    Where topk_idx is -1 the weight is some positive number, which must have no effect.
    """
    if name not in ROUTINGS:
        raise ValueError(f"routing = {name!r}: expected one of {sorted(ROUTINGS)}")
    if num_experts % num_ranks:
        raise ValueError(f"num_experts = {num_experts}: expected a multiple of num_ranks = {num_ranks}")
    own = torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)
    draw = _Draw(num_tokens, num_experts, num_topk, num_ranks, torch.Generator().manual_seed(seed), own)
    ids = ROUTINGS[name](draw)
    weights = torch.rand(num_tokens, num_topk, generator=own) + 0.1
    return ids.to(device, dtype), (weights / weights.sum(1, keepdim=True)).to(device)


def rows(num_rows: int, width: int, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal [num_rows, width]."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator, device=device, dtype=torch.float32).to(dtype)


def expert_weights(
    experts: range,
    hidden: int,
    intermediate_hidden: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(w13 [len(experts), 2I, H], w2 [len(experts), H, I]), normal with deviation 1 / sqrt(fan-in), of the experts with these global ids."""
    w13 = torch.empty(len(experts), 2 * intermediate_hidden, hidden, device=device, dtype=dtype)
    w2 = torch.empty(len(experts), hidden, intermediate_hidden, device=device, dtype=dtype)
    generator = torch.Generator(device)
    for slot, expert in enumerate(experts):
        generator.manual_seed(1_000_003 * (seed + 1) + expert)
        w13[slot].normal_(0, hidden**-0.5, generator=generator)
        w2[slot].normal_(0, intermediate_hidden**-0.5, generator=generator)
    return w13, w2
