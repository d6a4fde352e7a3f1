"""Forward and backward in one launch each on the GPU: the staged path's y, bit for bit, the accuracy of the whole suite, equal bits every time, any
order of calls beside staged ones, graphs whose routing changes, many random small cases, a peer that does not come."""

from __future__ import annotations

import pytest
import torch
from moe_support import make, same_bits, small, spread, tiny
from soak import RandomCases, Record, World
from test_mega_moe import MODEL_CASES, OPTION_CASES, ROUTING_CASES, SIZE_CASES

import deep_gemm
from deep_gemm.errors import PeerTimeoutError
from deep_gemm.testing import VirtualGroup, assert_bitwise_equal
from deep_gemm.testing.moe_cases import Ranks, compare, make_inputs, torch_outputs, truth

pytestmark = pytest.mark.gpu
RANDOM_SECONDS = 25


@pytest.fixture(autouse=True)
def backward_in_one_launch(monkeypatch):
    monkeypatch.setenv("DG_FUSED_BACKWARD", "1")


@pytest.mark.parametrize(
    "case", MODEL_CASES + ROUTING_CASES + SIZE_CASES + OPTION_CASES, ids=lambda c: f"{c.name}/E{c.num_experts}/K{c.num_topk}"
)
def test_like_the_staged_path(case, device, rehearsal):
    fused = make(case, device, rehearsal, "fused")
    actual = fused.outputs()
    made, inputs = fused.case, fused.inputs
    _, faults = compare(made, actual, truth(made, inputs), torch_outputs(made, inputs))
    assert not faults, "\n".join(faults)
    if not case.bias:  # the staged path rounds y rows before it adds b2, and dA' before the activation's gradient
        assert_bitwise_equal(actual["y"], make(case, device, rehearsal, "cuda").outputs()["y"], name="y (fused and staged)")


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8, 16])
def test_same_bits_every_time(num_ranks, save, device, rehearsal):
    ranks = make(small(num_experts=16, tokens=spread(150, num_ranks), routing="zipf1", save=save), device, rehearsal, "fused")
    first = ranks.outputs()
    for _ in range(20):
        same_bits(ranks.outputs(), first, "the first call and a later one")


def test_fused_and_staged_calls_in_turn(device, rehearsal):
    """They share barriers, whose counts go on from one to the other."""
    ranks = make(small(tokens=spread(100, 4)), device, rehearsal, "fused")
    other = None if rehearsal else "cuda"
    arguments = [ranks.arguments(rank) for rank in range(ranks.case.num_ranks)]
    ys = [
        [y for y, _ in ranks.run(lambda rank: deep_gemm.mega_moe_fwd(*arguments[rank], backend=backend))]  # noqa: B023 - run at once
        for backend in (None, other, other, None, None, other)
    ]
    for again in ys[1:]:
        for y, expected in zip(again, ys[0], strict=True):
            assert_bitwise_equal(y, expected, name="y")


@pytest.mark.parametrize("shares", [(40, 80), (7, 80), (1, 33, 2, 60)], ids=str)
def test_ranks_may_use_different_numbers_of_sms(shares, device, rehearsal):
    """Counters and order of work are each rank's own, so that `set_num_sms` may differ between the ranks."""
    case = small(num_experts=16, tokens=spread(300, len(shares)), routing="zipf1")
    if rehearsal:
        case = tiny(case)
    expected = make(case, device, rehearsal, "fused").outputs()
    group = None if rehearsal else VirtualGroup(len(shares), num_sms_per_rank=shares)
    ranks = Ranks(case, make_inputs(case, device), device, group, None if rehearsal else "fused")
    first = ranks.outputs()
    for name in ("y", "dx", "dp"):
        assert_bitwise_equal(first[name], expected[name], name=f"{name} with {shares} SMs")
    for _ in range(3):
        same_bits(ranks.outputs(), first, f"again with {shares} SMs")


def test_a_graph_follows_the_routing():
    ranks = make(small(tokens=(300,)), torch.device("cuda", torch.cuda.current_device()), False, "fused")
    arguments = ranks.arguments(0)
    deep_gemm.mega_moe_fwd(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = deep_gemm.mega_moe_fwd(*arguments)
    idx = arguments[1]
    for seed in range(5):
        gen = torch.Generator().manual_seed(seed)
        idx.copy_(torch.rand(idx.shape[0], ranks.case.num_experts, generator=gen).argsort(1)[:, : idx.shape[1]])
        graph.replay()
        torch.cuda.synchronize()
        expected, _ = deep_gemm.mega_moe_fwd(*arguments)
        assert_bitwise_equal(y, expected, name=f"y of replay {seed}")


def test_random_small_cases(device, rehearsal):
    record = Record("cases", seconds=1 if rehearsal else RANDOM_SECONDS)
    record.run(RandomCases(World(16, device, rehearsal)))
    assert record.steps and not record.faults, "\n".join(record.faults)


def test_a_missing_peer_is_named(monkeypatch):
    monkeypatch.setenv("DG_TIMEOUT_S", "2")
    ranks = make(small(tokens=spread(64, 2)), torch.device("cuda", torch.cuda.current_device()), False, "fused")
    arguments = ranks.arguments(0)
    ((y, _),) = ranks.group.run(lambda rank: deep_gemm.mega_moe_fwd(*arguments), ranks=[0])
    torch.cuda.synchronize()
    assert y.isnan().all()
    with pytest.raises(PeerTimeoutError, match="forward publish.*rank 1"):
        ranks.buffers[0].check()
