"""The forward in one launch without a GPU: kernel and argument as shipped, on the SIMT machine of tests/simt, a thread per rank.

Properties: y matches the oracle for R = 1 to 8, several rounds, split weights, biases, ids of both widths, absent slots, empty ranks, any
number of CTAs and any order of threads and copies; equal bits whatever that order; z of the first round is what GEMM 1 made; memory is NaN
before; faults put into the kernel are found; a peer that does not come, and ranks that make different calls, are named.
"""

from __future__ import annotations

import random
import shutil

import pytest
import torch
from simt.driver import tensor_maps
from simt.machine import INCLUDE, HopperKernel, SimtError
from simt.ranks import Ranks
from staged_case import CASES as COMMON_CASES
from staged_case import Case

from deep_gemm.errors import PeerTimeoutError
from deep_gemm.mega.fused.backend import FusedBackend
from deep_gemm.mega.fused.config import CONFIGS
from deep_gemm.mega.fused.forward import pack
from deep_gemm.testing import assert_bitwise_equal, assert_close

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the SIMT machine needs a C++ compiler (g++)")


class Kernel:
    def __init__(self, folder, config, **options):
        self.config, self.compiled = config, HopperKernel(folder, config.spec(), **options)


@pytest.fixture(scope="module", params=CONFIGS, ids=lambda config: config.name)
def kernel(tmp_path_factory, request):
    return Kernel(tmp_path_factory.mktemp("fused"), request.param)


def start(kernel, ranks, case, rank, y, z=None, *, ctas=2, order=0):
    """ctas: at most; whole clusters."""
    config = kernel.config
    ctas = max(1, ctas // config.cluster) * config.cluster
    problem = ranks.problem(rank, case.inputs(rank), activation=case.activation)  # holds the tensors whose addresses the argument has
    params = pack(ranks.resources[rank], problem, y, z, config, ctas)
    kernel.compiled.launch(params, ctas, config.smem_bytes, cluster=config.cluster, order=order, timeout_s=60.0)


def forward(kernel, case, *, ranks=None, save=False, capacity_factor=1.1, **launch):
    """[y], [z or None] of all ranks."""
    ranks = ranks or Ranks(None, case.num_ranks, capacity_factor=capacity_factor, **case.shape)
    rows = ranks.resources[0].layout.capacity_rows
    ys = [torch.full_like(x, float("nan")) for x in case.x]
    zs = [torch.full((rows, 2 * case.width), float("nan"), dtype=torch.bfloat16) if save else None for _ in ys]
    with tensor_maps():
        ranks.run(lambda rank: start(kernel, ranks, case, rank, ys[rank], zs[rank], **launch))
    for resources in ranks.resources:
        resources.faults.check()
    return ys, zs


def check(case, ys):
    for rank, y in enumerate(ys):
        if len(y):
            assert_close(y.double(), case.oracle_y(rank), rel_frobenius=1e-2, name=f"y of rank {rank}")


CASES = {
    **COMMON_CASES,
    "no_tokens": Case(1, tokens=(0,)),
    "wide": Case(2, 4, tokens=(40, 150), hidden=1152, width=256),
}


@pytest.mark.parametrize("ctas", [1, 2, 5])
@pytest.mark.parametrize("name", CASES)
def test_forward_matches_the_oracle(name, ctas, kernel):
    check(CASES[name], forward(kernel, CASES[name], ctas=ctas)[0])


def test_more_experts_than_threads(kernel):
    case = Case(1, 700, tokens=(500,))
    check(case, forward(kernel, case, ctas=3)[0])


@pytest.mark.parametrize("ctas", [3, 16])  # 16: some have no tile in a round, and leave it before others have left the one before
@pytest.mark.parametrize("order", range(6))
def test_several_rounds(order, ctas, kernel):
    case = Case(2, 4, tokens=(300, 280), biases=True, pair=True, skew=True, seed=order)
    ranks = Ranks(None, 2, capacity_factor=0.3 if ctas == 3 else 0.05, **case.shape)
    assert ranks.resources[0].layout.rounds > 2
    check(case, forward(kernel, case, ranks=ranks, ctas=ctas, order=order)[0])


def test_bits_do_not_depend_on_the_order(kernel):
    case = Case(2, 6, tokens=(150, 130), topk=3)
    first, _ = forward(kernel, case)
    for ctas, order in ((1, 1), (3, 2), (4, 3), (2, 4)):
        for y, expected in zip(forward(kernel, case, ctas=ctas, order=order)[0], first, strict=True):
            assert_bitwise_equal(y, expected, name=f"y with {ctas} CTAs, order {order}")


def test_ranks_may_have_different_numbers_of_ctas(kernel):
    case = Case(3, 6, tokens=(150, 0, 130), topk=3)
    expected, _ = forward(kernel, case)
    for ctas in ((1, 5, 2), (4, 2, 3)):
        ranks, ys = Ranks(None, 3, **case.shape), [torch.empty_like(x) for x in case.x]
        with tensor_maps():
            ranks.run(lambda rank: start(kernel, ranks, case, rank, ys[rank], ctas=ctas[rank]))  # noqa: B023 - run at once
        for y, same in zip(ys, expected, strict=True):
            assert_bitwise_equal(y, same, name=f"y with {ctas} CTAs")


@pytest.mark.parametrize("capacity_factor", [1.1, 0.3])
def test_z_of_the_first_round_is_saved(capacity_factor, kernel):
    case = Case(1, 4, tokens=(260,))
    ranks = Ranks(None, 1, capacity_factor=capacity_factor, **case.shape)
    ys, (z,) = forward(kernel, case, ranks=ranks, save=True, ctas=2)
    check(case, ys)
    flat, begin = case.idx[0].flatten(), 0
    for expert in range(case.num_experts):
        tokens = (flat == expert).nonzero().flatten() // case.topk
        if begin + len(tokens) <= len(z):  # whole in the first round
            expected = case.x[0][tokens].double() @ case.w13[expert].double().t()
            assert_close(z[begin : begin + len(tokens)].double(), expected, rel_frobenius=5e-3, name=f"z of expert {expert}")
        begin = -(-(begin + len(tokens)) // 128) * 128


@pytest.mark.parametrize("seed", range(24))
def test_random_cases(seed, kernel):
    choose = random.Random(seed)
    num_ranks = choose.choice([1, 2, 3, 4, 8])
    experts = num_ranks * choose.choice([1, 2, 3, 5])
    case = Case(
        num_ranks, experts, tokens=tuple(choose.choice([0, 1, 5, 33, 64, 130, 200]) for _ in range(num_ranks)), topk=min(experts, choose.choice([1, 2, 4, 8, 16])),
        hidden=choose.choice([128, 256, 384]), width=choose.choice([128, 256]), pair=choose.random() < 0.3, biases=choose.random() < 0.3,
        skew=choose.random() < 0.3, seed=seed,
    )  # fmt: skip
    ys, _ = forward(
        kernel, case, ctas=choose.choice([1, 2, 3, 5]), order=choose.randrange(50), save=choose.random() < 0.3,
        capacity_factor=choose.choice([0.25, 0.5, 1.1]),
    )  # fmt: skip
    check(case, ys)


def test_calls_one_after_another(kernel):
    """Counters and barriers go on from where the last launch left them, with another number of CTAs too."""
    case = Case(2, 4, tokens=(90, 70))
    ranks = Ranks(None, 2, **case.shape)
    for ctas in (2, 1, 4, 3):
        ranks.poison()
        check(case, forward(kernel, case, ranks=ranks, ctas=ctas)[0])


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("num_sms", [1, 5])
def test_backend_launches_what_the_call_needs(save, num_sms, kernel, monkeypatch):
    case = Case(1, 4, tokens=(70,))
    ranks = Ranks(None, 1, **case.shape)
    monkeypatch.setattr("deep_gemm.mega.fused.backend.current_stream", lambda device: 0)
    backend = object.__new__(FusedBackend)  # without what needs a device
    backend._resources, backend._config, backend._cooperative, backend._device = ranks.resources[0], kernel.config, True, None
    backend._kernels, backend._packed = {kernel.config: kernel.compiled}, {}
    backend._resources.num_sms = num_sms
    problem = ranks.problem(0, case.inputs(0), activation=case.activation, save=save)
    with tensor_maps():
        a, z = backend.gemm1(problem)
        y = backend.gemm2(problem, a)
    assert (tuple(a.shape), tuple(z.shape)) == backend.fake_shapes(problem)
    check(case, [y])
    assert y.data_ptr() != a.data_ptr()


# ---- faults --------------------------------------------------------------------------------------------------------------------------


def test_a_bad_id_is_named(kernel):
    case = Case(2, 4, tokens=(9, 7))
    case.idx[1][3, 2] = 99
    ranks = Ranks(None, 2, **case.shape)
    with pytest.raises(ValueError, match=r"topk_idx\[3, 2\] = 99 on rank 1"):
        forward(kernel, case, ranks=ranks)
    with pytest.raises(ValueError, match=r"topk_idx\[3, 2\] = 99"):
        ranks.resources[1].faults.check()


def test_a_peer_that_does_not_come_is_named(kernel):
    case = Case(2, 4, tokens=(9, 7))
    ranks, y = Ranks(None, 2, timeout_s=0.5, **case.shape), torch.zeros_like(case.x[0])
    with tensor_maps():
        ranks.run(lambda rank: start(kernel, ranks, case, rank, y), ranks=[0])
    assert y.isnan().all()
    with pytest.raises(PeerTimeoutError, match="rank 0 waited 0.5 s in phase 'forward publish .*for rank 1"):
        ranks.resources[0].faults.check()


FAULTS = {
    "a is not waited for": ("mainloop/sm90_mega_moe_forward_roles.cuh", "Traits::gemm1_writers(this->params)", "0u"),
    "a counts before it is stored": (
        "mainloop/sm90_mega_moe_roles.cuh",
        "  threads.sync();\n  if (Warpgroup::leader()) ptx::red",
        "  if (Warpgroup::leader()) ptx::red",
    ),
    "a row counts before it is stored": (
        "comm/dispatch_role.cuh",
        "    ptx::bulk_wait<0>();\n    ptx::fence_proxy_async();\n    unsigned number",
        "    unsigned number",
    ),
    "the pool is not waited for": ("comm/dispatch_role.cuh", "if (barriers().round > 0) wait_for_pool(barriers().round - 1);", ""),
    "rounds are counted together": (
        "kernels/sm90_mega_moe_traits.cuh",
        "ready(params, DG_READY_round_left, round), 1",
        "ready(params, DG_READY_round_left, 0), 1",
    ),
    "staging is not waited for": ("epilogue/push.cuh", "ptx::bulk_wait_read<0>();", ""),
    "slots are combined early": (
        "kernels/sm90_mega_moe.cuh",
        "grid().sync([&] { route().pass_barrier(params.push_tag, 0); });",
        "",
    ),
    "a token is fetched by nobody": ("comm/dispatch_role.cuh", "if (first != row) {", "if (true) {"),
}


FAULT_CASES = [Case(1, 1, tokens=(100,), topk=1, width=256), Case(2, 4, tokens=(300, 280), skew=True, hidden=256)]


def goes_wrong(kernel, case, order):
    ranks = Ranks(None, case.num_ranks, capacity_factor=0.3, timeout_s=8.0, **case.shape)
    try:
        check(case, forward(kernel, case, ranks=ranks, ctas=3, order=order)[0])
    except (AssertionError, SimtError, PeerTimeoutError):
        return True
    return False


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("config", CONFIGS[:1], ids=lambda config: config.name)
def test_faults_are_found(config, name, tmp_path, monkeypatch):
    monkeypatch.setattr("deep_gemm.mega.fused.launch.LAG_WAVES", 0)  # GEMM 2 comes as early as it may
    path, before, after = FAULTS[name]
    include = tmp_path / "include"
    shutil.copytree(INCLUDE, include, ignore=shutil.ignore_patterns("third_party"))
    text = (include / path).read_text()
    assert before in text
    (include / path).write_text(text.replace(before, after))
    broken = Kernel(tmp_path / "build", config, include=include)
    assert any(goes_wrong(broken, case, order) for case in FAULT_CASES for order in range(4))
