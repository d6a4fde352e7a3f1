"""Tiny Qwen3-MoE models, batches, and the eager model's logits and gradients that everything is compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB, EXPERTS, SEQUENCE = 64, 8, 12


def config(**options) -> Qwen3MoeConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return Qwen3MoeConfig(**(sizes | options))


def make_model(
    implementation: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, initialise: bool = True, **options
) -> Qwen3MoeForCausalLM:
    """Equal weights for equal seeds. Wider than the default initialisation, so that routing and gradients are not all alike."""
    model = Qwen3MoeForCausalLM(config(experts_implementation=implementation, **options))
    if not initialise:
        return model.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return model.to(dtype)


def batch(index: int, *, rows: int = 2) -> Tensor:
    """[rows, SEQUENCE] token ids; a pattern that can be learnt, with noise."""
    generator = torch.Generator().manual_seed(100 + index)
    start, step = torch.randint(VOCAB, (rows, 1), generator=generator), torch.randint(1, 4, (rows, 1), generator=generator)
    return (start + step * torch.arange(SEQUENCE)) % VOCAB


def loss_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def mean_gradients(model: torch.nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of the mean of the batches' losses, by parameter name."""
    model.zero_grad()
    for ids in batches:
        (loss_of(model, ids) / len(batches)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def assert_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-5) -> None:
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    errors = {name: relative(actual[name], expected[name]) for name in expected}
    wrong = {name: error for name, error in errors.items() if not error <= bound}
    assert not wrong, f"relative Frobenius errors above {bound}: {wrong}"
