"""The staged CUDA backend without a GPU: its kernels on the SIMT machine of tests/simt, its launches as shipped, its GEMMs by torch.

Properties: forward and every gradient match the oracle for R = 1 to 4, several rounds, split weights, biases, ids of both widths, absent
slots, empty ranks; equal bits whatever the order of threads; nothing is read that the call has not written (memory is NaN before);
calls in any order (A alone, A A B, B after another A); faults are raised and name what happened.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from simt.machine import SimtLauncher, compile_machine
from simt.ranks import Ranks, TorchGemms
from staged_case import CASES, PLAIN, WEIGHTS, Case, compare, joined, like_ones

from deep_gemm.errors import PeerTimeoutError
from deep_gemm.mega.backend import GRADIENTS, WeightGrads
from deep_gemm.testing import assert_bitwise_equal, assert_close

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the SIMT machine needs a C++ compiler (g++)")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_machine(tmp_path_factory.mktemp("simt"))


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr("deep_gemm.mega.staged.call.gemm_launch", TorchGemms())
    monkeypatch.setattr("deep_gemm.mega.staged.call.current_stream", lambda device: 0)


def ranks_of(case, launcher, **options):
    return Ranks(launcher, case.num_ranks, **case.shape, **options)


def solve(case, ranks, *, save="recompute", grads=None, needs=None):
    """[(y, Gradients)] of all ranks, NaN everywhere between the calls."""
    problems = [ranks.problem(r, case.inputs(r), activation=case.activation, save=save) for r in range(case.num_ranks)]
    halves = ranks.run(lambda r: ranks.gemm1(problems[r]))
    ys = ranks.run(lambda r: ranks.gemm2(problems[r], halves[r][0]))
    ranks.poison()
    needs = case.needs if needs is None else needs
    targets = grads or [WeightGrads() for _ in problems]
    made = ranks.run(lambda r: ranks.backward(problems[r], case.dy[r], halves[r][1], needs, targets[r]))
    for resources in ranks.resources:
        resources.faults.check()
    return list(zip(ys, made, strict=True))


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_match_the_oracle(name, save, library):
    case = CASES[name]
    compare(case, solve(case, ranks_of(case, SimtLauncher(library)), save=save), *case.oracle())


def test_more_experts_than_threads_of_the_planning_kernels(library):
    case = Case(1, 1100, tokens=(600,))
    ranks = ranks_of(case, SimtLauncher(library))
    problem = ranks.problem(0, case.inputs(0), activation=PLAIN)
    assert_close(ranks.gemm2(problem, ranks.gemm1(problem)[0]).double(), case.oracle_y(0), rel_frobenius=1e-2, name="y")


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_rounds_and_accumulated_gradients(dtype, pair, library):
    case = Case(2, 4, tokens=(300, 280), biases=True, pair=pair, skew=True)
    ranks = ranks_of(case, SimtLauncher(library), capacity_factor=0.3)
    assert ranks.resources[0].layout.rounds > 2
    made = solve(case, ranks, save="preact", grads=[WeightGrads(dtype=dtype)] * 2)
    compare(case, made, *case.oracle())
    ones = [WeightGrads(*(like_ones(getattr(g, name)) for name in WEIGHTS), accumulate=True) for _, g in made]
    again = solve(case, ranks, grads=ones)
    for (_, first), (_, second), target in zip(made, again, ones, strict=True):
        for name in WEIGHTS:
            assert joined(getattr(target, name)).equal(joined(getattr(second, name)))
            assert_close(joined(getattr(second, name)).double() - 1, joined(getattr(first, name)).double(), rel_frobenius=2e-2, name=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("counts", "capacity"), [((512,), 256), ((256, 128, 128), 512), ((384, 0, 128), 512), ((257, 255), 384)])
def test_experts_that_fill_windows_to_the_row(counts, capacity, dtype, library):
    case = Case(1, len(counts), tokens=(512,), topk=1)
    case.idx[0] = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[:, None]
    ranks = ranks_of(case, SimtLauncher(library), capacity_factor=(capacity - 128 * len(counts)) / 512)
    assert ranks.resources[0].layout.capacity_rows == capacity and ranks.resources[0].layout.rounds > 1
    compare(case, solve(case, ranks, grads=[WeightGrads(dtype=dtype)]), *case.oracle())


def test_bits_do_not_depend_on_the_order_of_threads(library):
    case = CASES["two_ranks"]
    first, second = (solve(case, ranks_of(case, SimtLauncher(library, reversed=reverse))) for reverse in (False, True))
    for (y, g), (y2, g2) in zip(first, second, strict=True):
        assert_bitwise_equal(y, y2, name="y")
        for name in ("dx", "dtopk_weights", "dw2", "db2"):
            assert_bitwise_equal(getattr(g, name), getattr(g2, name), name=name)


@pytest.mark.parametrize("needs", [("x",), ("topk_weights",), ("w13",), ("w2",), ("b13",), ("b2",), ("w2", "x")])
@pytest.mark.parametrize("save", ["recompute", "preact"])
def test_each_gradient_alone_has_the_bits_of_all_together(needs, save, library):
    case = Case(1, biases=True)
    (everything,) = solve(case, ranks_of(case, SimtLauncher(library)), save=save)
    (alone,) = solve(case, ranks_of(case, SimtLauncher(library)), save=save, needs=needs)
    names = {"x": "dx", "topk_weights": "dtopk_weights"}
    for name in GRADIENTS:
        attribute = names.get(name, f"d{name}")
        if name in needs:
            assert_bitwise_equal(joined(getattr(alone[1], attribute)), joined(getattr(everything[1], attribute)), name=attribute)
        else:
            assert getattr(alone[1], attribute) is None


def test_first_halves_without_second_and_second_after_another_first(library):
    case, other = Case(2, tokens=(19, 37)), Case(2, tokens=(37, 4), seed=1)
    ranks = ranks_of(case, SimtLauncher(library))

    def story(r):
        mine, theirs = (ranks.problem(r, c.inputs(r), activation=PLAIN) for c in (case, other))
        a, _ = ranks.gemm1(mine)
        ranks.gemm1(theirs)  # checkpoint recomputation stops after A
        b, _ = ranks.gemm1(theirs)
        y = ranks.gemm2(mine, a)  # has to publish again
        made = ranks.backward(theirs, other.dy[r], b.new_empty(0), ("x",), WeightGrads())
        return y, ranks.gemm2(theirs, b), made.dx

    results = ranks.run(story)
    for rank, (y, z, dx) in enumerate(results):
        assert_close(y.double(), case.oracle()[0][rank], rel_frobenius=1e-2, name="y after another A")
        assert_close(z.double(), other.oracle()[0][rank], rel_frobenius=1e-2, name="y after a backward")
        assert_close(dx.double(), other.oracle()[1]["x"][rank], rel_frobenius=2e-2, name="dx")


def test_bad_id_gives_nan_rows_and_is_named_on_every_rank(library):
    case = Case(2, tokens=(19, 37))
    for rank, (token, slot, value) in enumerate([(7, 2, 8), (30, 1, -2)]):
        case.idx[rank][token, slot] = value
    ranks = ranks_of(case, SimtLauncher(library))
    problems = [ranks.problem(r, case.inputs(r), activation=PLAIN) for r in range(2)]
    ys = ranks.run(lambda r: ranks.gemm2(problems[r], ranks.gemm1(problems[r])[0]))
    for y, token in zip(ys, (7, 30), strict=True):
        bad = y.isnan().any(dim=1)
        assert bad.nonzero().flatten().tolist() == [token]
    with pytest.raises(ValueError, match=r"^topk_idx\[7, 2\] = 8, but num_experts = 8 \(valid: -1 or 0\.\.7\)"):
        ranks.resources[0].faults.check()
    with pytest.raises(ValueError, match=r"^topk_idx\[7, 2\] = 8 on rank 0"):
        ranks.resources[1].faults.check()
    good = Case(2, tokens=(19, 37))
    compare(good, solve(good, ranks), *good.oracle())


def test_late_peer_is_named_and_ends_the_buffer(library):
    case = Case(3, 12, tokens=(5, 6, 7))
    ranks = ranks_of(case, SimtLauncher(library), timeout_s=0.3)
    problems = [ranks.problem(r, case.inputs(r), activation=PLAIN) for r in range(3)]
    ys = ranks.run(lambda r: ranks.gemm2(problems[r], ranks.gemm1(problems[r])[0]), ranks=[0, 1])
    assert all(y.isnan().all() for y in ys)
    ranks.poison()  # what is left of plans and lists must not be read: it would send rows anywhere
    needs = [name for name in GRADIENTS if not name.startswith("b")]
    empty = case.x[0].new_empty(0)
    for made in ranks.run(lambda r: ranks.backward(problems[r], case.dy[r], empty, needs, WeightGrads()), ranks=[0, 1]):
        assert made.dx.isnan().all() and made.dtopk_weights.isnan().all() and not made.dw2.any()
    for _ in range(2):
        with pytest.raises(
            PeerTimeoutError, match=r"rank 0 waited 0\.3 s in phase 'forward publish' for rank 2: barrier 1, rank 2 has reached 0"
        ):
            ranks.resources[0].faults.check()
    ranks.run(lambda r: ranks.gemm1(problems[r]), ranks=[2])  # the late one learns of it at once
    with pytest.raises(PeerTimeoutError, match="rank 2 stopped waiting in phase 'forward publish': rank 0 gave up at barrier 1"):
        ranks.resources[2].faults.check()


def test_ranks_that_make_different_calls_are_told(library):
    case = Case(2, tokens=(9, 9))
    ranks = ranks_of(case, SimtLauncher(library), timeout_s=5)
    problems = [ranks.problem(r, case.inputs(r), activation=PLAIN) for r in range(2)]
    needs = [("x", "w2"), ("w2",)]
    ranks.run(lambda r: ranks.backward(problems[r], case.dy[r], case.x[r].new_empty(0), needs[r], WeightGrads()))
    with pytest.raises(
        PeerTimeoutError, match=r"rank 0 is in phase 'backward publish \(detail 1\)' of barrier 1, rank 1 in 'backward publish'"
    ):
        ranks.resources[0].faults.check()
