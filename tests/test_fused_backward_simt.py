"""The backward in one launch without a GPU: kernel and argument as shipped, on the SIMT machine of tests/simt, a thread per rank.

Properties: every gradient matches the oracle for R = 1 to 8, with z saved and recomputed, one round and several, weight gradients BF16 and FP32, stored
and accumulated, split weights, absent slots, empty ranks and experts, any number of CTAs and any order of threads and copies; equal bits
whatever that order; what is not wanted is not made; memory is NaN before; faults put into the kernel are found.
"""

from __future__ import annotations

import random
import shutil

import pytest
import torch
from simt.driver import tensor_maps
from simt.machine import INCLUDE, HopperKernel, SimtError
from simt.ranks import Ranks
from staged_case import Case, compare, joined, like_ones

from deep_gemm.errors import PeerTimeoutError
from deep_gemm.mega.backend import WeightGrads
from deep_gemm.mega.fused import backward, forward
from deep_gemm.mega.fused.backend import FusedBackend
from deep_gemm.mega.fused.config import ALONE, SHARED
from deep_gemm.mega.staged.backward import Wanted, allocate
from deep_gemm.testing import assert_bitwise_equal, assert_close

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the SIMT machine needs a C++ compiler (g++)")

VARIANTS = [(ALONE, torch.float32), (SHARED, torch.bfloat16)]


class Kernels:
    """Both directions of one variant."""

    def __init__(self, folder, config, dtype, **options):
        self.config, self.dtype, self.wgrad_config = config, dtype, config.backward(dtype)
        self.forward = HopperKernel(folder / "forward", config.spec(), **options)
        self.backward = HopperKernel(folder / "backward", self.wgrad_config.spec(), **options)


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: f"c{v[0].cluster}-{v[1]}")
def kernels(tmp_path_factory, request):
    return Kernels(tmp_path_factory.mktemp("fused"), *request.param)


def whole_clusters(config, ctas):
    return max(1, ctas // config.cluster) * config.cluster


def start(kernel, config, params, ctas, order):
    kernel.launch(params, ctas, config.smem_bytes, cluster=config.cluster, order=order, timeout_s=60.0)


def save_z(kernels, case, ranks):
    """z of every rank's first round, as the forward saves it."""
    rows = ranks.resources[0].layout.capacity_rows
    zs = [torch.full((rows, 2 * case.width), float("nan"), dtype=torch.bfloat16) for _ in case.x]

    def run(rank):
        problem, ctas = ranks.problem(rank, case.inputs(rank), activation=case.activation), whole_clusters(kernels.config, 3)
        y = torch.empty_like(case.x[rank])  # held: the argument has its address
        params = forward.pack(ranks.resources[rank], problem, y, zs[rank], kernels.config, ctas)
        start(kernels.forward, kernels.config, params, ctas, 0)

    ranks.run(run)
    ranks.poison()
    return zs


def differentiate(kernels, case, *, ranks=None, save=False, needs=None, grads=None, ctas=2, order=0, capacity_factor=1.1):
    """[Gradients] of all ranks."""
    ranks = ranks or Ranks(None, case.num_ranks, capacity_factor=capacity_factor, **case.shape)
    wanted = Wanted.of(frozenset(case.needs if needs is None else needs))
    grads = grads or [WeightGrads(dtype=kernels.dtype) for _ in case.x]
    ctas = whole_clusters(kernels.config, ctas)

    def run(rank, z):
        problem = ranks.problem(rank, case.inputs(rank), activation=case.activation)
        assert backward.can_run(problem, wanted, grads[rank]) and backward.wgrad_dtype(grads[rank]) == kernels.dtype
        made = allocate(problem, wanted, grads[rank])
        params = backward.pack(
            ranks.resources[rank], problem, case.dy[rank], z, wanted, made, grads[rank].accumulate, kernels.wgrad_config, ctas
        )
        start(kernels.backward, kernels.wgrad_config, params, ctas, order)
        return made

    with tensor_maps():
        zs = save_z(kernels, case, ranks) if save else [None] * case.num_ranks
        made = ranks.run(lambda rank: run(rank, zs[rank]))
    for resources in ranks.resources:
        resources.faults.check()
    return made


def check(case, made):
    ys, truth = case.oracle()
    compare(case, [(y.to(torch.bfloat16), m) for y, m in zip(ys, made, strict=True)], ys, truth)


CASES = {
    "one_rank": Case(),
    "one_rank_pair": Case(pair=True, idx=torch.int32),
    "two_ranks": Case(2, tokens=(19, 37)),
    "four_ranks_one_empty": Case(4, tokens=(5, 0, 64, 33), pair=True, idx=torch.int32),
    "three_ranks_all_to_one": Case(3, 12, tokens=(90, 70, 110), skew=True),
    "one_expert": Case(1, 1, tokens=(3,), topk=1),
    "most_slots": Case(2, 38, tokens=(21, 3), topk=16),
    "wide": Case(2, 4, tokens=(40, 150), hidden=384, width=256),
    "no_tokens": Case(1, tokens=(0,)),
}


@pytest.mark.parametrize("ctas", [1, 2, 5])
@pytest.mark.parametrize("save", [False, True], ids=["recompute", "preact"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_match_the_oracle(name, save, ctas, kernels):
    check(CASES[name], differentiate(kernels, CASES[name], save=save, ctas=ctas))


@pytest.mark.parametrize(("ctas", "capacity_factor"), [(3, 0.3), (16, 0.05)])
@pytest.mark.parametrize("save", [False, True], ids=["recompute", "preact"])
@pytest.mark.parametrize("order", range(3))
def test_several_rounds_and_accumulated_gradients(order, save, ctas, capacity_factor, kernels):
    case = Case(2, 4, tokens=(300, 280), pair=order == 1, skew=True, seed=order)
    ranks = Ranks(None, 2, capacity_factor=capacity_factor, **case.shape)
    assert ranks.resources[0].layout.rounds > 2
    options = {"ranks": ranks, "save": save, "ctas": ctas, "order": order}
    made = differentiate(kernels, case, **options)
    check(case, made)
    ones = [WeightGrads(like_ones(m.dw13), like_ones(m.dw2), accumulate=True, dtype=kernels.dtype) for m in made]
    for first, second in zip(made, differentiate(kernels, case, grads=ones, **options), strict=True):
        for name in ("dw13", "dw2"):
            added, alone = joined(getattr(second, name)).double() - 1, joined(getattr(first, name)).double()
            assert_close(added, alone, rel_frobenius=2e-2, name=name)


@pytest.mark.parametrize(("counts", "capacity"), [((512,), 256), ((256, 128, 128), 512), ((384, 0, 128), 512), ((257, 255), 384)])
def test_experts_that_fill_windows_to_the_row(counts, capacity, kernels):
    case = Case(1, len(counts), tokens=(512,), topk=1)
    case.idx[0] = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None]
    ranks = Ranks(None, 1, capacity_factor=(capacity - 128 * len(counts)) / 512, **case.shape)
    assert ranks.resources[0].layout.capacity_rows == capacity and ranks.resources[0].layout.rounds > 1
    check(case, differentiate(kernels, case, ranks=ranks, ctas=3))


def test_bits_do_not_depend_on_the_order(kernels):
    case = Case(2, 6, tokens=(150, 130), topk=3)
    first = differentiate(kernels, case)
    for ctas, order in ((1, 1), (3, 2), (5, 3), (2, 4)):
        for again, expected in zip(differentiate(kernels, case, ctas=ctas, order=order), first, strict=True):
            for name in ("dx", "dtopk_weights", "dw13", "dw2"):
                assert_bitwise_equal(
                    joined(getattr(again, name)), joined(getattr(expected, name)), name=f"{name}, {ctas} CTAs, order {order}"
                )


@pytest.mark.parametrize("save", [False, True], ids=["recompute", "preact"])
@pytest.mark.parametrize("needs", [("x",), ("topk_weights",), ("w13",), ("w2", "x"), ("w13", "topk_weights")])
def test_each_gradient_alone_has_the_bits_of_all_together(needs, save, kernels):
    case = Case(2, tokens=(40, 33))
    for alone, everything in zip(
        differentiate(kernels, case, save=save, needs=needs), differentiate(kernels, case, save=save), strict=True
    ):
        for name, attribute in {"x": "dx", "topk_weights": "dtopk_weights", "w13": "dw13", "w2": "dw2"}.items():
            if name in needs:
                assert_bitwise_equal(joined(getattr(alone, attribute)), joined(getattr(everything, attribute)), name=attribute)
            else:
                assert getattr(alone, attribute) is None


def test_experts_without_rows_keep_what_is_accumulated(kernels):
    case = Case(1, 6, tokens=(50,), topk=2)
    case.idx[0] = case.idx[0].masked_fill(case.idx[0] > 3, -1)
    (made,) = differentiate(kernels, case)
    assert not joined(made.dw13)[4:].any() and not made.dw2[4:].any()
    ones = WeightGrads(like_ones(made.dw13), like_ones(made.dw2), accumulate=True, dtype=kernels.dtype)
    (again,) = differentiate(kernels, case, grads=[ones])
    assert (joined(again.dw13)[4:] == 1).all() and (again.dw2[4:] == 1).all()


@pytest.mark.parametrize("seed", range(16))
def test_random_cases(seed, kernels):
    choose = random.Random(seed)
    num_ranks = choose.choice([1, 2, 3, 4, 8])
    experts = num_ranks * choose.choice([1, 2, 3, 5])
    case = Case(
        num_ranks, experts, tokens=tuple(choose.choice([0, 1, 5, 33, 64, 130, 200]) for _ in range(num_ranks)), topk=min(experts, choose.choice([1, 2, 4, 8, 16])),
        hidden=choose.choice([128, 256, 384]), width=choose.choice([128, 256]), pair=choose.random() < 0.3, skew=choose.random() < 0.3, seed=seed,
    )  # fmt: skip
    check(case, differentiate(
        kernels, case, save=choose.random() < 0.5, ctas=choose.choice([1, 2, 3, 5]), order=choose.randrange(50), capacity_factor=choose.choice([0.25, 0.5, 1.1]),
    ))  # fmt: skip


def test_backend_takes_the_launch_that_serves_the_call(kernels, monkeypatch):
    """One launch; biases, a gradient of W2 alone and weight gradients of two types go to the staged backend."""
    case = Case(1, 4, tokens=(70,))
    ranks = Ranks(None, 1, **case.shape)
    monkeypatch.setattr("deep_gemm.mega.fused.backend.current_stream", lambda device: 0)
    backend = object.__new__(FusedBackend)  # without what needs a device
    backend._resources, backend._config, backend._cooperative, backend._device = ranks.resources[0], kernels.config, True, None
    backend._kernels, backend._packed = {kernels.wgrad_config: kernels.backward}, {}
    monkeypatch.setenv("DG_FUSED_BACKWARD", "1")
    problem = ranks.problem(0, case.inputs(0), activation=case.activation)
    with tensor_maps():
        made = backend.backward(problem, case.dy[0], torch.empty(0), frozenset(case.needs), WeightGrads(dtype=kernels.dtype))
    check(case, [made])
    all_needs = Wanted.of(frozenset(case.needs))
    biased = Case(1, 4, tokens=(7,), biases=True)
    assert not backward.can_run(ranks.problem(0, biased.inputs(0), activation=case.activation), all_needs, WeightGrads())
    assert not backward.can_run(problem, Wanted.of(frozenset({"w2"})), WeightGrads())
    assert not backward.can_run(problem, all_needs, WeightGrads(dw2=torch.empty(4, 128, 128, dtype=torch.bfloat16), dtype=torch.float32))


FAULTS = {
    "dy is not waited for": ("mainloop/sm90_mega_moe_backward_roles.cuh", "wait_for_block(tile, DG_READY_dy, tile.block_rows)", "wait_for_block(tile, DG_READY_dy, 0)"),
    "dZ is not waited for": ("mainloop/sm90_mega_moe_backward_roles.cuh", "DG_READY_dgrad2, Traits::dp_tiles(params))", "DG_READY_dgrad2, 0)"),
    "the round's dZ is not waited for": ("mainloop/sm90_mega_moe_backward_roles.cuh", "tile.block * Traits::dp_tiles(this->params)", "0"),
    "the staging is not waited for": ("mainloop/sm90_mega_moe_backward_roles.cuh", "smem.staged[warpgroup].wait((round ^ (warpgroup == 0)) & 1);", ""),
    "carries do not change places": ("mainloop/sm90_mega_moe_backward_roles.cuh", "tile.round % 2 == 1", "false"),
}  # fmt: skip
FAULT_CASES = [Case(1, 1, tokens=(100,), topk=1, width=256), Case(2, 4, tokens=(300, 280), skew=True, hidden=256)]


def goes_wrong(kernels, case, order):
    ranks = Ranks(None, case.num_ranks, capacity_factor=0.3, timeout_s=8.0, **case.shape)
    try:
        check(case, differentiate(kernels, case, ranks=ranks, save=order % 2 == 1, ctas=3, order=order))
    except (AssertionError, SimtError, PeerTimeoutError):
        return True
    return False


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name, tmp_path, monkeypatch):
    monkeypatch.setattr("deep_gemm.mega.fused.launch.LAG_WAVES", 0)  # every step comes as early as it may
    path, before, after = FAULTS[name]
    include = tmp_path / "include"
    shutil.copytree(INCLUDE, include, ignore=shutil.ignore_patterns("third_party"))
    text = (include / path).read_text()
    assert before in text
    (include / path).write_text(text.replace(before, after))
    broken = Kernels(tmp_path / "build", ALONE, torch.bfloat16, include=include)
    assert any(goes_wrong(broken, case, order) for case in FAULT_CASES for order in range(4))
