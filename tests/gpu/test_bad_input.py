"""Bad input on the GPU: what is wrong is named before any launch, or, for values that only the device sees, at the next call; nothing hangs and
the next good call works. Late peers are named, with both ranks and the phase."""

from __future__ import annotations

import time

import pytest
import torch

import deep_gemm
from deep_gemm.testing import VirtualGroup, assert_bitwise_equal
from deep_gemm.testing.moe_cases import MoeCase, Ranks, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CASE = MoeCase("small", 256, 128, 16, 4, (64,))
SHORT_S = 2.0


@pytest.fixture
def ranks() -> Ranks:
    """R = 1, and a check that a good call works when the test is over."""
    device = torch.device("cuda", torch.cuda.current_device())
    made = Ranks(CASE, make_inputs(CASE, device), device)
    expected = made.outputs()
    yield made
    made.inputs = make_inputs(CASE, device)
    for name, tensor in made.outputs().items():
        assert_bitwise_equal(tensor, expected[name], name=name)


def call(ranks: Ranks, **changes):
    names = ("x", "topk_idx", "topk_weights", "w13", "w2", "buffer")
    arguments = {**dict(zip(names, ranks.arguments(0), strict=True)), **changes}
    return deep_gemm.mega_moe_fwd(**arguments)


BAD = {
    "dtype of x": (lambda a: {"x": a["x"].float()}, TypeError, r"x\.dtype = torch\.float32: expected torch\.bfloat16"),
    "hidden": (lambda a: {"x": a["x"][:, :128].contiguous()}, ValueError, r"x\.shape = \(64, 128\): expected \(T, 256\)"),
    "too many tokens": (lambda a: {"x": a["x"].repeat(2, 1)}, ValueError, r"T = 128 tokens, expected at most num_max_tokens_per_rank = 64"),
    "device of x": (lambda a: {"x": a["x"].cpu()}, ValueError, r"x\.device = cpu: expected cuda"),
    "device of topk_idx": (lambda a: {"topk_idx": a["topk_idx"].cpu()}, ValueError, r"topk_idx\.device = cpu"),
    "contiguity of x": (lambda a: {"x": a["x"].t().contiguous().t()}, ValueError, r"x is not contiguous"),
    "dtype of topk_idx": (lambda a: {"topk_idx": a["topk_idx"].short()}, TypeError, r"topk_idx\.dtype = torch\.int16"),
    "shape of topk_idx": (lambda a: {"topk_idx": a["topk_idx"][:, :3].contiguous()}, ValueError, r"topk_idx\.shape = \(64, 3\)"),
    "shape of w2": (lambda a: {"w2": a["w2"].transpose(1, 2).contiguous()}, ValueError, r"w2\.shape = \(16, 128, 256\)"),
    "alignment of x": (lambda a: {"x": misaligned(a["x"])}, ValueError, r"x\.data_ptr\(\) = .* multiple of 16"),
    "activation": (lambda a: {"activation": "gelu"}, ValueError, r"activation = 'gelu'"),
    "save": (lambda a: {"save": "all"}, ValueError, r"save = 'all'"),
    "precision": (lambda a: {"precision": "fp8"}, NotImplementedError, r"precision = 'fp8'"),
}


def misaligned(x: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return memory[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize("what", BAD)
def test_argument_is_named_before_any_launch(what, ranks):
    change, error, text = BAD[what]
    names = ("x", "topk_idx", "topk_weights", "w13", "w2")
    generation = ranks.buffers[0].generation
    with pytest.raises(error, match=text):
        call(ranks, **change(dict(zip(names, ranks.arguments(0), strict=False))))
    assert ranks.buffers[0].generation == generation


@pytest.mark.parametrize(
    "settings,text",
    [
        ({"hidden": 2880}, "hidden = 2880: expected a multiple of 128 on CUDA; pad to 2944"),
        ({"intermediate_hidden": 100}, "intermediate_hidden = 100: expected a multiple of 128 on CUDA; pad to 128"),
        ({"num_topk": 17}, r"num_topk = 17: expected 1\.\.16"),
    ],
)
def test_setting_that_the_kernels_cannot_serve_is_named(settings, text):
    good = {"num_experts": 16, "num_max_tokens_per_rank": 64, "num_topk": 4, "hidden": 256, "intermediate_hidden": 128}
    with pytest.raises(ValueError, match=text):
        deep_gemm.get_symm_buffer_for_mega_moe(None, **{**good, **settings}, device="cuda")


@pytest.mark.parametrize("bad", [16, 1000, -2, 2**40])
def test_id_out_of_range_is_reported_without_a_sync(bad, ranks):
    """By the next call, or buffer.check(); the token's y is NaN, the others' are right."""
    clean, _ = call(ranks)
    idx = ranks.inputs.topk_idx[0].clone()
    idx[17, 3] = bad
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, _ = call(ranks, topk_idx=idx)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(ValueError, match=r"topk_idx\[17, 3\] = .*but num_experts = 16 \(valid: -1 or 0\.\.15\)"):
        ranks.buffers[0].check()
    others = torch.arange(64, device=y.device) != 17
    assert y[17].isnan().all()
    assert_bitwise_equal(y[others], clean[others])
    ranks.buffers[0].check()  # raised once


def test_id_out_of_range_is_raised_by_the_next_call(ranks):
    idx = ranks.inputs.topk_idx[0].clone()
    idx[3, 0] = 99
    call(ranks, topk_idx=idx)
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"topk_idx\[3, 0\] = 99"):
        call(ranks)


def test_id_out_of_range_is_raised_at_the_call_under_debug(ranks, monkeypatch):
    monkeypatch.setenv("DG_DEBUG", "1")
    idx = ranks.inputs.topk_idx[0].clone()
    idx[17, 3] = 131
    with pytest.raises(ValueError, match=r"topk_idx\[17, 3\] = 131, but num_experts = 16"):
        call(ranks, topk_idx=idx)


def virtual_ranks(group: VirtualGroup) -> Ranks:
    case = MoeCase("small", 256, 128, 16, 4, (64, 33, 64, 1))
    device = torch.device("cuda", torch.cuda.current_device())
    return Ranks(case, make_inputs(case, device), device, group)


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setenv("DG_TIMEOUT_S", str(SHORT_S))
    return VirtualGroup(4)


def test_late_peer_is_named_on_every_rank_that_waited(group):
    ranks = virtual_ranks(group)
    good = ranks.outputs()
    begin = time.perf_counter()
    group.run(lambda rank: deep_gemm.mega_moe_fwd(*ranks.arguments(rank)), ranks=[0, 1, 3])
    for rank in (0, 1, 3):
        with pytest.raises(deep_gemm.PeerTimeoutError, match=rf"rank {rank} (waited .* for rank 2|stopped waiting)"):
            ranks.buffers[rank].check()
    assert time.perf_counter() - begin < 10 * SHORT_S
    with pytest.raises(deep_gemm.PeerTimeoutError):  # the ranks are out of step for good
        deep_gemm.mega_moe_fwd(*ranks.arguments(0))
    fresh = virtual_ranks(group)
    for name, tensor in fresh.outputs().items():
        assert_bitwise_equal(tensor, good[name], name=name)


def test_ranks_that_make_different_calls_are_told(group):
    """Rank 0 asks for other gradients than the rest."""
    ranks = virtual_ranks(group)
    ranks.outputs()
    states = [state for _, state in ranks.forward()]
    needs = [("x",), ("w13",), ("w13",), ("w13",)]
    targets = [ranks.targets(rank) for rank in range(4)]
    given = [{name: t for name, t in targets[r].items() if name == "dw13" and needs[r] == ("w13",)} for r in range(4)]
    group.run(lambda r: deep_gemm.mega_moe_bwd(ranks.inputs.dy[r], states[r], needs=needs[r], **given[r]))
    texts = []
    for buffer in ranks.buffers:
        with pytest.raises(deep_gemm.PeerTimeoutError) as caught:
            buffer.check()
        texts.append(str(caught.value))
    assert any("different calls" in text for text in texts), texts


def test_id_out_of_range_on_one_rank_is_reported_and_the_others_go_on(group):
    ranks = virtual_ranks(group)
    good = ranks.outputs()
    kept = ranks.inputs.topk_idx[1].clone()
    ranks.inputs.topk_idx[1][5, 2] = 77
    ranks.forward()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"topk_idx\[5, 2\] = 77"):
        ranks.buffers[1].check()
    ranks.inputs.topk_idx[1].copy_(kept)
    for buffer in ranks.buffers:
        try:
            buffer.check()
        except ValueError as error:
            assert "topk_idx[5, 2] = 77 on rank 1" in str(error)  # peers may report it too
    for name, tensor in ranks.outputs().items():
        assert_bitwise_equal(tensor, good[name], name=name)
