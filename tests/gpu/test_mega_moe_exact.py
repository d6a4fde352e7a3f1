"""What must hold exactly for Mega MoE on the GPU: equal bits on every run, for both save policies, for any capacity and number of ranks;
accumulation; frozen inputs; layers that share a buffer; a fault in one token stays there; graphs, compile, opcheck and checkpointing; no wait
for the device; memory whatever the routing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from moe_support import same_bits, small, spread
from torch.utils.checkpoint import checkpoint

import deep_gemm
from deep_gemm.mega import checks, ops
from deep_gemm.testing import assert_bitwise_equal, assert_close
from deep_gemm.testing.generators import routing
from deep_gemm.testing.moe_cases import GRADIENT_NAMES, MoeCase, Ranks, collect

pytestmark = pytest.mark.gpu

# ---- equal bits --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_same_bits_on_every_run(num_ranks, make_ranks):
    ranks = make_ranks(small(tokens=spread(300, num_ranks), routing="zipf1", num_experts=32))
    first = ranks.outputs()
    for run in range(5):
        same_bits(ranks.outputs(), first, f"run {run}")


def test_same_bits_at_a_model_shape(make_ranks):
    ranks = make_ranks(MoeCase.of_model("qwen3-30b", spread(512, 2)))
    same_bits(ranks.outputs(), ranks.outputs(), "second run")


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_both_save_policies_have_the_same_bits(num_ranks, make_ranks):
    case = small(tokens=spread(200, num_ranks), routing="holes")
    for factor in (1.25, 0.25):
        once = make_ranks(replace(case, capacity_factor=factor)).outputs()
        same_bits(make_ranks(replace(case, capacity_factor=factor, save="preact")).outputs(), once, f"capacity_factor {factor}")


@pytest.mark.parametrize("route", ["uniform", "one-hot-rank"])
def test_capacity_does_not_change_y_dx_dp(route, make_ranks):
    """Weight gradients of an expert that is cut by a round are summed in another order, so they are compared as numbers."""
    case = small(tokens=spread(256, 4), routing=route)
    once = make_ranks(case).outputs()
    for factor in (0.05, 0.25, 0.5, 2.0):
        other = make_ranks(replace(case, capacity_factor=factor)).outputs()
        same_bits(
            {name: other[name] for name in ("y", "dx", "dp")}, {name: once[name] for name in ("y", "dx", "dp")}, f"capacity_factor {factor}"
        )
        for name in ("dw13", "dw2"):
            assert_close(other[name], once[name], rel_frobenius=1e-5, name=f"{name} (capacity_factor {factor})")


def test_y_dx_dp_do_not_depend_on_the_number_of_ranks(make_ranks):
    """A row's result depends on its token and its expert, not on where they are."""
    case = small(tokens=(256,))
    one = make_ranks(case)
    whole, inputs = one.outputs(), one.inputs
    for num_ranks in (2, 8):
        ranks = make_ranks(replace(case, tokens=spread(256 // num_ranks, num_ranks)))
        if ranks.group is None:
            continue  # a rehearsal has one rank whatever the case says
        parts = {name: list(getattr(inputs, name)[0].chunk(num_ranks)) for name in ("x", "topk_idx", "topk_weights", "dy")}
        ranks.inputs = replace(inputs, **parts)
        split = ranks.outputs()
        same_bits({name: split[name] for name in ("y", "dx", "dp")}, {name: whole[name] for name in ("y", "dx", "dp")}, f"R = {num_ranks}")


# ---- gradients: frozen, accumulated, empty -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_subset_of_gradients_has_the_bits_of_all(num_ranks, make_ranks):
    ranks = make_ranks(small(tokens=spread(100, num_ranks)))
    everything = ranks.outputs()
    names = ("dx", "dp", "dw13", "dw2")
    for size in range(len(names)):
        for subset in itertools.combinations(names, size):
            some = ranks.outputs(needs=tuple(GRADIENT_NAMES[name] for name in subset))
            same_bits(some, {name: everything[name] for name in ("y", *subset)}, f"needs {subset}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_weight_gradients_add_into_main_grads(num_ranks, dtype, make_ranks):
    """Two micro-batches into one gradient; experts without rows are left as they were."""
    ranks = make_ranks(small(tokens=spread(128, num_ranks), routing="one-expert", wgrad_dtype=dtype))
    once = ranks.outputs()
    start = 0.5
    targets = [ranks.targets(rank, fill=start) for rank in range(ranks.case.num_ranks)]
    for _ in range(2):
        ranks.poison()
        states = [state for _, state in ranks.forward()]
        grads = ranks.backward(states, targets=targets, accumulate=True)
    total = collect([torch.empty(0)], grads)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for name in ("dw13", "dw2"):
        used = once[name].flatten(1).any(1)
        assert used.sum() == 1
        assert (total[name][~used] == start).all(), f"{name} of an expert without rows was touched"
        assert_close(total[name][used], start + 2 * once[name][used].float(), rel_frobenius=tolerance, name=name)


def test_experts_without_rows_get_exact_zeros(make_ranks):
    ranks = make_ranks(small(tokens=(128,), routing="one-expert"))
    out = ranks.outputs()
    for name in ("dw13", "dw2"):
        assert (out[name].flatten(1) == 0).all(1).sum() == ranks.case.num_experts - 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_fault_in_one_token_stays_in_it_and_its_experts(num_ranks, bad, make_ranks):
    ranks = make_ranks(small(tokens=spread(64, num_ranks), num_topk=2))
    clean = ranks.outputs()
    ranks.inputs.x[0][5, 3] = bad
    dirty = ranks.outputs()
    touched = torch.zeros(clean["y"].shape[0], dtype=torch.bool, device=ranks.device)
    touched[5] = True
    experts = torch.zeros(ranks.case.num_experts, dtype=torch.bool, device=ranks.device)
    experts[ranks.inputs.topk_idx[0][5].long()] = True
    assert dirty["y"][5].isnan().any()
    for name, keep in (("y", ~touched), ("dx", ~touched), ("dp", ~touched), ("dw13", ~experts), ("dw2", ~experts)):
        assert_bitwise_equal(dirty[name][keep], clean[name][keep], name=name)


# ---- calls in any order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_two_layers_share_a_buffer(num_ranks, save, make_ranks):
    """fwd 1, fwd 2, bwd 2, bwd 1 has the bits of each layer alone."""
    first = make_ranks(small(tokens=spread(96, num_ranks), save=save))
    second = make_ranks(small(tokens=spread(96, num_ranks), save=save, routing="holes", seed=9))
    alone = [first.outputs(), second.outputs()]
    second.buffers = first.buffers
    forward = [layer.forward() for layer in (first, second)]
    first.poison()
    grads = [second.backward([state for _, state in forward[1]]), first.backward([state for _, state in forward[0]])]
    for layer, made, expected in zip(forward, reversed(grads), alone, strict=True):
        same_bits(collect([y for y, _ in layer], made), expected, "interleaved")
    second.buffers = []


def leaves_of(ranks: Ranks, rank: int) -> list[torch.Tensor]:
    x, topk_idx, p, w13, w2, buffer = ranks.arguments(rank)
    x, p, w13, w2 = (t.detach().clone().requires_grad_() for t in (x, p, w13, w2))
    return [x, topk_idx, p, w13, w2, buffer]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_autograd_has_the_bits_of_the_explicit_calls(num_ranks, make_ranks):
    ranks = make_ranks(small(tokens=spread(100, num_ranks), wgrad_dtype=torch.bfloat16))
    expected = ranks.outputs()
    leaves = [leaves_of(ranks, rank) for rank in range(ranks.case.num_ranks)]
    ranks.poison()
    ys = ranks.run(lambda r: deep_gemm.mega_moe(*leaves[r]))
    ranks.run(lambda r: ys[r].backward(ranks.inputs.dy[r]))
    out = {"y": torch.cat([y.detach() for y in ys])}
    for name, position in (("dx", 0), ("dp", 2), ("dw13", 3), ("dw2", 4)):
        out[name] = torch.cat([leaf[position].grad for leaf in leaves])
    same_bits(out, expected, "autograd")


def grads_of(fn, leaves: list, dy: torch.Tensor) -> list[torch.Tensor]:
    wanted = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    y = fn(*leaves)
    return [y.detach(), *torch.autograd.grad(y, wanted, dy)]


@pytest.mark.parametrize("save", ["recompute", "preact"])
def test_checkpointed_call_has_the_same_bits(save, make_ranks):
    ranks = make_ranks(small(tokens=(100,)))
    leaves, dy = leaves_of(ranks, 0), ranks.inputs.dy[0]

    def layer(*arguments):
        return deep_gemm.mega_moe(*arguments, save=save)

    for again, once in zip(
        grads_of(lambda *a: checkpoint(layer, *a, use_reentrant=False), leaves, dy), grads_of(layer, leaves, dy), strict=True
    ):
        assert_bitwise_equal(again, once)


def test_compiled_call_has_the_same_bits(make_ranks):
    ranks = make_ranks(small(tokens=(100,)))
    leaves, dy = leaves_of(ranks, 0), ranks.inputs.dy[0]
    compiled = torch.compile(deep_gemm.mega_moe, fullgraph=True)
    for again, once in zip(grads_of(compiled, leaves, dy), grads_of(deep_gemm.mega_moe, leaves, dy), strict=True):
        assert_bitwise_equal(again, once)


@pytest.mark.parametrize("save", ["recompute", "preact"])
def test_opcheck(save, make_ranks):
    ranks = make_ranks(small(tokens=(40,)))
    x, topk_idx, p, w13, w2, buffer = leaves_of(ranks, 0)
    options = checks.encode_options(buffer, "swiglu", None, None, save, None, None)
    call = (x, topk_idx, p, w13, None, w2, None, None, None, buffer.handle, options)
    detached = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in call)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    # Rows of a pool that no group has are never written, so the scratch outputs of A may differ between two runs; y and gradients may not.
    torch.library.opcheck(ops.gemm1, call, test_utils=tests)
    proxy, a, z = ops.gemm1(*detached)
    torch.library.opcheck(ops.gemm2, (proxy.clone().requires_grad_(), a, *call), test_utils=tests)
    torch.library.opcheck(ops.backward, (ranks.inputs.dy[0], z, *detached, "x topk_weights w13 w2"), test_utils=tests)


# ---- the stream --------------------------------------------------------------------------------------------------------------------


def on_gpu(ranks: Ranks) -> Ranks:
    if ranks.device.type != "cuda":
        pytest.skip("--on-cpu: this test is about the GPU")
    return ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_graph_replays_with_another_routing(num_ranks, make_ranks):
    case = small(tokens=spread(128, num_ranks), save="preact")
    ranks = on_gpu(make_ranks(case))
    routed = {"uniform": [], "zipf1": [], "all-masked": []}
    for name, made in routed.items():  # what a call without a graph makes of each routing
        reroute(ranks, name)
        made.append(ranks.outputs())
    targets = [ranks.targets(rank) for rank in range(num_ranks)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward = ranks.forward()
        grads = ranks.backward([state for _, state in forward], targets=targets)
    for name in ("zipf1", "uniform", "all-masked", "zipf1"):
        reroute(ranks, name)
        ranks.poison()
        graph.replay()
        same_bits(collect([y for y, _ in forward], grads), routed[name][0], f"replay, {name}")


def reroute(ranks: Ranks, name: str) -> None:
    case, inputs = ranks.case, ranks.inputs
    for rank, tokens in enumerate(case.tokens):
        idx, p = routing(name, tokens, case.num_experts, case.num_topk, num_ranks=case.num_ranks, rank=rank, seed=3, device=ranks.device)
        inputs.topk_idx[rank].copy_(idx)
        inputs.topk_weights[rank].copy_(p)


@pytest.mark.parametrize("save", ["recompute", "preact"])
def test_no_call_waits_for_the_device(save, make_ranks):
    ranks = on_gpu(make_ranks(small(tokens=(128,), save=save)))
    ranks.outputs()
    targets = [ranks.targets(0)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward = ranks.forward()
        ranks.backward([state for _, state in forward], targets=targets)
        leaves = leaves_of(ranks, 0)
        deep_gemm.mega_moe(*leaves, save=save).backward(ranks.inputs.dy[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_calls_follow_the_current_stream(make_ranks):
    """x is written on the same stream behind 50 ms of other work: a launch elsewhere would read what was there before."""
    ranks = on_gpu(make_ranks(small(tokens=(128,))))
    expected = ranks.outputs()["y"]
    x = ranks.inputs.x[0].clone()
    ranks.inputs.x[0].fill_(float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        ranks.inputs.x[0].copy_(x)
        y = ranks.forward()[0][0]
    torch.cuda.current_stream().wait_stream(stream)
    assert_bitwise_equal(y, expected)


def peak_bytes(ranks: Ranks) -> int:
    ranks.outputs()
    targets = [ranks.targets(rank) for rank in range(ranks.case.num_ranks)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward = ranks.forward()
    ranks.backward([state for _, state in forward], targets=targets)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("save", ["recompute", "preact"])
def test_memory_does_not_depend_on_the_routing(save, make_ranks):
    ranks = on_gpu(make_ranks(small(tokens=spread(256, 4), save=save)))
    peaks = {}
    for name in ("uniform", "one-hot-rank", "one-expert", "all-masked"):
        reroute(ranks, name)
        peaks[name] = peak_bytes(ranks)
    assert len(set(peaks.values())) == 1, peaks


def test_memory_pays_for_what_is_saved_and_nothing_else(make_ranks):
    """recompute keeps nothing beyond the caller's tensors; without gradients preact keeps nothing either."""
    for save, grad, keeps in (("recompute", True, False), ("preact", True, True), ("preact", False, False)):
        ranks = on_gpu(make_ranks(small(tokens=(1000,), save=save)))
        leaves = leaves_of(ranks, 0)
        deep_gemm.mega_moe(*leaves, save=save)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.set_grad_enabled(grad):
            y = deep_gemm.mega_moe(*leaves, save=save)
        kept = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        rows = 1000 * ranks.case.num_topk
        assert (kept > rows * ranks.case.intermediate_hidden) == keeps, f"save = {save}, grad = {grad}: {kept} bytes kept"
        del y, leaves  # else the next round would see their memory come back
