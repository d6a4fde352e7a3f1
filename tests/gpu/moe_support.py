"""What the GPU tests of Mega MoE share: small cases, virtual groups that outlive a test, tiny versions for a rehearsal, comparisons of bits."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import torch

from deep_gemm.testing import ROUTINGS, VirtualGroup, assert_bitwise_equal
from deep_gemm.testing.moe_cases import MoeCase, Ranks, make_inputs

RESERVE_BYTES = 1 << 30  # per rank: z and a of the largest case, so that no rank allocates while another waits for it
REHEARSAL_LIMITS = {"hidden": 128, "intermediate_hidden": 128, "num_experts": 16}


def small(**options) -> MoeCase:
    """H = 256, I = 128, 16 experts: the kernels' edges at little cost."""
    return MoeCase(
        **{"model": "small", "hidden": 256, "intermediate_hidden": 128, "num_experts": 16, "num_topk": 4, "tokens": (200,), **options}
    )


def spread(tokens: int, num_ranks: int) -> tuple[int, ...]:
    return (tokens,) * num_ranks


@cache
def virtual_group(num_ranks: int) -> VirtualGroup:
    """One per R: its streams keep the memory that was put aside for them."""
    return VirtualGroup(num_ranks, reserve_bytes=RESERVE_BYTES)


def tiny(case: MoeCase) -> MoeCase:
    limits = {name: min(getattr(case, name), limit) for name, limit in REHEARSAL_LIMITS.items()}
    tokens = tuple(min(t, 24) for t in case.tokens)
    return replace(case, **limits, num_topk=min(case.num_topk, 4, limits["num_experts"]), tokens=tokens)


def make(case: MoeCase, device: torch.device, rehearsal: bool, backend: str | None = None) -> Ranks:
    """Ranks of the case on `backend`, or of its tiny version on the device's in a rehearsal."""
    if rehearsal:
        case = tiny(case)
        group = VirtualGroup(1, "cpu") if case.num_ranks == 1 else None
    else:
        group = virtual_group(case.num_ranks) if case.num_ranks > 1 else None
    return Ranks(case, make_inputs(case, device), device, group, None if rehearsal else backend)


def random_case(choose: random.Random, seed: int) -> MoeCase:
    """1 to 16 ranks; tokens, experts, K, routing, rounds and save policy at random."""
    num_ranks = choose.choice([1, 2, 3, 4, 8, 16])
    experts = num_ranks * choose.choice([1, 2, 5])
    return small(
        num_experts=experts, num_topk=min(experts, choose.choice([1, 2, 4, 8])), tokens=tuple(choose.choice([0, 1, 7, 64, 129, 200]) for _ in range(num_ranks)),
        routing=choose.choice(list(ROUTINGS)), capacity_factor=choose.choice([0.25, 0.5, 1.25]), seed=seed, save=choose.choice(["recompute", "preact"]),
    )  # fmt: skip


def same_bits(actual: dict, expected: dict, what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bitwise_equal(actual[name], tensor, name=f"{name} ({what})")
