"""Mega MoE on the GPU, R = 1 and R = 2, 4, 8 virtual ranks: forward and every gradient against the FP32 oracle, no further off than 1.1x the
torch path on the same input; all buffers full of NaN before every call.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from moe_support import small, spread

from deep_gemm.testing.generators import ROUTINGS
from deep_gemm.testing.moe_cases import MoeCase, Ranks, compare, torch_outputs, truth

pytestmark = pytest.mark.gpu

MODEL_CASES = [
    MoeCase.of_model("qwen3-30b", (1024,)),
    MoeCase.of_model("qwen3-30b", (1024,), save="preact", pair=True, seed=1),
    MoeCase.of_model("qwen3-30b", (1000,), routing="zipf1", seed=2),
    MoeCase.of_model("qwen3-30b", spread(512, 2), seed=3),
    MoeCase.of_model("qwen3-30b", spread(256, 4), routing="zipf1", save="preact", seed=4),
    MoeCase.of_model("qwen3-30b", spread(128, 8), routing="one-hot-rank", seed=5),
    MoeCase.of_model("qwen3-30b", (300, 0, 129, 1), routing="holes", seed=6),
    MoeCase.of_model("qwen3-235b", (512,), num_experts=64),
    MoeCase.of_model("qwen3-235b", spread(256, 2), num_experts=64, routing="zipf1", seed=1),
    MoeCase.of_model("deepseek-v3", (256,), num_experts=32),
    MoeCase.of_model("deepseek-v3", spread(128, 4), num_experts=32, save="preact", seed=1),
    MoeCase("H5120", 5120, 2304, 16, 4, spread(128, 2)),
    MoeCase("H6144", 6144, 2048, 16, 4, (256,)),
]
ROUTING_CASES = [
    small(routing=name, tokens=spread(tokens, num_ranks), save=save)
    for name, (num_ranks, tokens, save) in itertools.product(
        ROUTINGS, ((1, 200, "recompute"), (2, 129, "preact"), (4, 77, "recompute"), (8, 64, "preact"))
    )
]
SIZE_CASES = [
    *(small(tokens=(tokens,), seed=tokens) for tokens in (0, 1, 7, 127, 128, 129, 1000)),
    *(small(tokens=tokens, seed=sum(tokens)) for tokens in ((0, 1), (0, 0), (129, 7), (0, 300, 1, 128), (5, 0, 0, 250, 1, 64, 127, 129))),
    *(
        small(num_experts=e, num_topk=k, tokens=spread(96, r))
        for e, k, r in ((8, 1, 2), (8, 2, 8), (32, 6, 4), (64, 8, 2), (128, 8, 4), (256, 8, 8))
    ),
    *(small(num_experts=e, num_topk=k) for e, k in ((8, 1), (8, 8), (16, 16), (256, 8))),
]
OPTION_CASES = [
    small(**{"tokens": spread(150, num_ranks), "routing": "holes", **options})
    for num_ranks in (1, 4)
    for options in (
        {"pair": True},
        {"idx_dtype": torch.int32},
        {"wgrad_dtype": torch.bfloat16},
        {"activation_clamp": 0.75},
        {"activation": "swiglu_oai", "bias": True},
        {"bias": True, "pair": True, "save": "preact"},
        {"capacity_factor": 0.25},
        {"capacity_factor": 2.0, "save": "preact"},
        {"capacity_factor": 0.05, "save": "preact", "routing": "one-expert"},
        {"capacity_factor": 0.05, "wgrad_dtype": torch.bfloat16, "routing": "one-hot-rank"},
    )
]


# ---- accuracy ----------------------------------------------------------------------------------------------------------------------


def check_accuracy(ranks: Ranks, accuracy) -> None:
    case, inputs = ranks.case, ranks.inputs
    actual = ranks.outputs()
    rows, faults = compare(case, actual, truth(case, inputs), torch_outputs(case, inputs))
    accuracy.add("mega-moe", rows)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("case", MODEL_CASES, ids=lambda case: case.name)
def test_model_shapes(case, make_ranks, accuracy):
    check_accuracy(make_ranks(case), accuracy)


@pytest.mark.parametrize("case", ROUTING_CASES, ids=lambda case: case.name)
def test_routings(case, make_ranks, accuracy):
    check_accuracy(make_ranks(case), accuracy)


@pytest.mark.parametrize("case", SIZE_CASES, ids=lambda case: f"{case.name}/E{case.num_experts}/K{case.num_topk}")
def test_sizes(case, make_ranks, accuracy):
    check_accuracy(make_ranks(replace(case, model=f"small-E{case.num_experts}-K{case.num_topk}")), accuracy)


@pytest.mark.parametrize("case", OPTION_CASES, ids=lambda case: case.name)
def test_options(case, make_ranks, accuracy):
    check_accuracy(make_ranks(case), accuracy)
