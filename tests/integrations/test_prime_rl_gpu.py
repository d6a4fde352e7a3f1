"""prime-rl's adapter on one GPU: two virtual ranks, forward and backward through autograd, against the plain formula in FP64."""

from __future__ import annotations

import os

# Virtual ranks need a hardware queue each, which the context takes when it is made.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import pytest
import torch
from prime_rl_contract import LAYOUTS, E, GroupedExperts, H, I, K, eager_moe, fill, split_weights

import deep_gemm
from deep_gemm.integrations.prime_rl import MegaMoETokenDispatcher
from deep_gemm.testing import VirtualGroup, assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

RANKS, TOKENS = 2, (150, 97)


def share(experts: GroupedExperts, rank: int) -> GroupedExperts:
    """A module with this rank's experts."""
    mine, count = GroupedExperts(), E // RANKS
    del mine.gate_up_proj, mine.down_proj
    for name, parameter in experts.named_parameters():
        mine.register_parameter(name, torch.nn.Parameter(parameter.detach()[rank * count : (rank + 1) * count].clone()))
    return mine


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("save", ["recompute", "preact"])
def test_two_virtual_ranks(layout, save):
    experts = fill(GroupedExperts(layout), dtype=torch.bfloat16).cuda()
    generator = torch.Generator().manual_seed(0)
    x, dy = ([torch.randn(t, H, generator=generator).cuda().bfloat16() for t in TOKENS] for _ in range(2))
    ids = [torch.rand(t, E, generator=generator).topk(K).indices.cuda() for t in TOKENS]
    scores = [torch.rand(t, K, generator=generator).cuda() for t in TOKENS]
    group = VirtualGroup(RANKS)
    mine = [share(experts, rank) for rank in range(RANKS)]
    leaves = [[x[r].clone().requires_grad_(), scores[r].clone().requires_grad_(), *mine[r].parameters()] for r in range(RANKS)]
    made = [MegaMoETokenDispatcher(E, K, H, I, group.rank(r), max(TOKENS), save=save, device="cuda") for r in range(RANKS)]
    warm_up(mine[0], x[0], scores[0], save)

    def forward(r):
        return made[r].run(leaves[r][0], leaves[r][1], ids[r], mine[r], score_before_experts=False)

    y = group.run(forward)
    gradients = group.run(lambda r: torch.autograd.grad(y[r], leaves[r], dy[r]))
    for dispatcher in made:
        dispatcher.buffer.check()

    exact = fill(GroupedExperts(layout), dtype=torch.bfloat16).cuda().double()
    wanted = [[x[r].double().requires_grad_(), scores[r].double().requires_grad_()] for r in range(RANKS)]
    outputs = [eager_moe(wanted[r][0], ids[r], wanted[r][1], *split_weights(exact)) for r in range(RANKS)]
    torch.autograd.backward(outputs, [part.double() for part in dy])
    for r in range(RANKS):
        assert_close(y[r], outputs[r], rel_frobenius=0.01, name=f"y of rank {r}")
        assert_close(gradients[r][0], wanted[r][0].grad, rel_frobenius=0.01, name=f"dx of rank {r}")
        assert_close(gradients[r][1], wanted[r][1].grad, rel_frobenius=0.01, name=f"dtop_scores of rank {r}")
    for position, (name, parameter) in enumerate(exact.named_parameters()):
        whole = torch.cat([gradients[r][2 + position] for r in range(RANKS)])
        assert_close(whole, parameter.grad, rel_frobenius=0.01, name=name)


def warm_up(experts: GroupedExperts, x: torch.Tensor, scores: torch.Tensor, save: str) -> None:
    """Has torch load every kernel that a call launches: loading one may wait for a rank that waits for this one."""
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, E // RANKS, max(TOKENS), K, H, I, device="cuda")
    gate, up, down = split_weights(experts)
    w13 = experts.gate_up_proj if hasattr(experts, "gate_up_proj") else (gate, up)
    ids = torch.zeros(scores.shape, dtype=torch.int64, device="cuda")
    deep_gemm.mega_moe(x.clone().requires_grad_(), ids, scores.clone().requires_grad_(), w13, down, buffer, save=save).sum().backward()
    experts.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
