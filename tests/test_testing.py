"""The tools of the tests: error measures see what they should, NaN never passes, routings are what their names say, results files are whole,
timing reports medians, and the torch path is the layer of the oracle."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from deep_gemm import reference
from deep_gemm.testing import generators, numeric, results, timing
from deep_gemm.testing.torch_path import torch_moe


def test_measures_match_their_formulas():
    truth, actual = torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    errors = numeric.measure_errors(actual, truth)
    assert errors.rel_frobenius == pytest.approx(((actual - truth).norm() / truth.norm()).item())
    inner = (actual * truth).sum()
    assert errors.diff == pytest.approx((1 - 2 * inner / ((actual * actual).sum() + (truth * truth).sum())).item())
    assert errors.max_row_rel == pytest.approx(((actual - truth).norm(dim=1) / truth.norm(dim=1)).max().item())


def test_measures_do_not_depend_on_the_chunking(monkeypatch):
    truth, actual = torch.randn(100, 8), torch.randn(100, 8)
    whole = numeric.measure_errors(actual, truth)
    monkeypatch.setattr(numeric, "_CHUNK_ELEMENTS", 24)
    assert numeric.measure_errors(actual, truth) == whole


def test_one_wrong_row_shows_in_the_row_error_only():
    truth = torch.randn(100_000, 8)
    actual = truth.clone()
    actual[77] = 0
    errors = numeric.measure_errors(actual, truth)
    assert errors.rel_frobenius < 1e-2 and errors.max_row_rel == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_never_pass(bad):
    truth = torch.ones(4, 4)
    actual = truth.clone()
    actual[3, 3] = bad
    for bounds in ({"rel_frobenius": math.inf}, {"diff": math.inf}, {"max_row_rel": math.inf}):
        with pytest.raises(AssertionError, match="dx: "):
            numeric.assert_close(actual, truth, name="dx", **bounds)


def test_exact_zeros_ask_for_exact_zeros():
    zeros = torch.zeros(3, 3)
    assert numeric.measure_errors(zeros, zeros) == numeric.Errors(0.0, 0.0, 0.0)
    with pytest.raises(AssertionError):
        numeric.assert_close(torch.full((3, 3), 1e-30), zeros, max_row_rel=1e9)


def test_bitwise_comparison_sees_the_sign_of_zero_and_takes_equal_nans():
    numeric.assert_bitwise_equal(torch.tensor([math.nan]), torch.tensor([math.nan]))
    with pytest.raises(AssertionError, match="1 of 2 elements"):
        numeric.assert_bitwise_equal(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))


@pytest.mark.parametrize("name", generators.ROUTINGS)
def test_routing_keeps_its_promise(name):
    num_experts, num_topk, num_ranks = 16, 4, 4
    by_rank = [generators.routing(name, 200, num_experts, num_topk, num_ranks=num_ranks, rank=r, seed=3) for r in range(num_ranks)]
    ids = torch.cat([idx for idx, _ in by_rank])
    weights = torch.cat([p for _, p in by_rank])
    assert ids.dtype == torch.int64 and ids.min() >= -1 and ids.max() < num_experts
    assert weights.min() > 0 and torch.allclose(weights.sum(1), torch.ones(len(weights)))
    counts = torch.bincount(ids[ids >= 0], minlength=num_experts)
    per_rank = counts.view(num_ranks, -1).sum(1)
    if name != "repeated":
        ordered = ids.sort(1).values
        assert not ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(), "an expert twice in one token"
    expected = {
        "uniform": (ids >= 0).all() and counts.float().std() < 0.2 * counts.float().mean(),
        "zipf1": (ids >= 0).all() and counts.max() > 3 * counts.min(),
        "one-hot-rank": (per_rank > 0).sum() == 1 and (ids >= 0).all(),
        "idle-rank": (per_rank == 0).sum() == 1 and (ids >= 0).all(),
        "one-expert": (counts > 0).sum() == 1 and counts.sum() == len(ids),
        "holes": 0.2 < (ids < 0).float().mean() < 0.4,
        "all-masked": (ids == -1).all(),
        "repeated": (ids == ids[:, :1]).all(),
    }
    assert expected[name]


def test_one_hot_rank_with_fewer_experts_than_slots_masks_the_rest():
    ids, _ = generators.routing("one-hot-rank", 50, 8, 4, num_ranks=4)
    assert ((ids >= 0).sum(1) == 2).all()


def test_weights_do_not_depend_on_the_spread_over_ranks():
    whole = generators.expert_weights(range(8), 16, 8)
    parts = [generators.expert_weights(range(begin, begin + 4), 16, 8) for begin in (0, 4)]
    for index in range(2):
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts]))


def test_results_file_has_environment_and_merges_by_key(tmp_path):
    path = tmp_path / "nested" / "accuracy.json"
    errors = numeric.Errors(1e-3, 1e-6, 2e-3)
    results.merge(
        path, [results.accuracy_row("a", "y", errors, 2e-3), results.accuracy_row("b", "y", errors, None)], key=("case", "tensor")
    )
    results.merge(path, [results.accuracy_row("b", "y", numeric.Errors(5.0, 0.0, 0.0), None)], key=("case", "tensor"))
    content = json.loads(path.read_text())
    assert [(row["case"], row["rel_frobenius"]) for row in content["rows"]] == [("a", 1e-3), ("b", 5.0)]
    assert set(content) == {"commit", "date", "command", "gpu", "num_gpus", "driver", "torch", "cuda", "clocks", "rows"}
    assert [entry.name for entry in path.parent.iterdir()] == ["accuracy.json"]


def test_rows_of_another_commit_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_COMMIT", "old")
    results.merge(tmp_path / "x.json", [{"case": "a"}], key=("case",))
    monkeypatch.setenv("SOURCE_COMMIT", "new")
    results.merge(tmp_path / "x.json", [{"case": "b"}], key=("case",))
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == [{"case": "b"}]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    results.write(path, [{"case": "a"}])
    with pytest.raises(TypeError):
        results.write(path, [{"case": object()}])
    assert json.loads(path.read_text())["rows"] == [{"case": "a"}] and len(list(tmp_path.iterdir())) == 1


def test_timing_reports_order_statistics():
    measured = timing.Timing.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (measured.median_ms, measured.p10_ms, measured.p90_ms) == (3.0, 1.0, 5.0)


def test_alternation_runs_competitors_in_turn():
    log = []
    measured = timing.alternate(
        {"a": lambda: log.append("a"), "b": lambda: log.append("b")}, warmups=1, calls=2, before=lambda: log.append("-")
    )
    assert log == ["-", "a", "-", "b"] * 3 and set(measured) == {"a", "b"}


def test_sustained_counts_the_second_half_only():
    calls = []

    def slow_at_first():
        import time

        calls.append(None)
        time.sleep(0.02 if len(calls) < 4 else 0.005)

    assert timing.sustained_ms(slow_at_first, seconds=0.2) < 15


def _problem(name: str, num_ranks: int = 1, rank: int = 0):
    idx, p = generators.routing(name, 37, 8, 3, num_ranks=num_ranks, rank=rank, seed=5)
    x, dy = (generators.rows(37, 32, seed=10 * rank + s, dtype=torch.float32) for s in (1, 2))
    return x, idx, p, dy


def _gradients(fn, tensors, dy):
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = fn(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("name", generators.ROUTINGS)
@pytest.mark.parametrize("split", [False, True])
def test_torch_path_is_the_layer_of_the_oracle(name, split):
    x, idx, p, dy = _problem(name)
    w13, w2 = generators.expert_weights(range(8), 32, 16, dtype=torch.float32)
    pack = (lambda w: tuple(w.chunk(2, 1))) if split else (lambda w: w)
    actual = _gradients(lambda x, p, w13, w2: torch_moe(x, idx, p, pack(w13), w2), (x, p, w13, w2), dy)
    truth = reference.backward(dy, x, idx, p, w13, w2)
    truth = [reference.forward(x, idx, p, w13, w2), *(truth[key] for key in ("x", "topk_weights", "w13", "w2"))]
    for tensor, a, t in zip(("y", "dx", "dp", "dw13", "dw2"), actual, truth):
        numeric.assert_close(a, t, rel_frobenius=1e-5, row_floor=1.0, max_row_rel=1e-4, name=tensor)


def _ep_worker(rank: int, num_ranks: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    try:
        for name in ("uniform", "idle-rank", "holes", "all-masked"):
            problems = [_problem(name, num_ranks, r) for r in range(num_ranks)]
            x, idx, p, dy = (torch.cat(parts) for parts in zip(*problems))
            w13, w2 = generators.expert_weights(range(8), 32, 16, dtype=torch.float32)
            whole = _gradients(lambda x, p, w13, w2: torch_moe(x, idx, p, w13, w2), (x, p, w13, w2), dy)  # noqa: B023
            mine = slice(rank * 8 // num_ranks, (rank + 1) * 8 // num_ranks)
            x, idx, p, dy = problems[rank]
            part = _gradients(
                lambda x, p, w13, w2: torch_moe(x, idx, p, w13, w2, group=dist.group.WORLD),  # noqa: B023
                (x, p, w13[mine], w2[mine]),
                dy,
            )
            tokens = slice(37 * rank, 37 * (rank + 1))
            for tensor, a, t, which in zip(("y", "dx", "dp", "dw13", "dw2"), part, whole, (tokens, tokens, tokens, mine, mine)):
                numeric.assert_close(a, t[which], rel_frobenius=1e-5, name=f"{name} rank {rank} {tensor}")
    finally:
        dist.destroy_process_group()


def test_torch_path_with_two_ranks_equals_one(tmp_path):
    mp.spawn(_ep_worker, (2, str(tmp_path / "rendezvous")), nprocs=2)
