"""Expert parallelism of the oracle over gloo: unequal and zero T, ranks without rows, needs that differ; the same bits as one rank."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from deep_gemm.activation import resolve_activation
from deep_gemm.mega.backend import GRADIENTS, Problem, WeightGrads
from deep_gemm.reference.backend import ReferenceBackend

E, H, I = 8, 37, 19
ALL = frozenset(GRADIENTS)


@dataclass(frozen=True)
class Case:
    tokens: tuple[int, ...]  # T of each rank
    num_topk: int = 3
    routing: str = "random"  # or "first_rank": only experts of rank 0; "none": all -1
    precision: str = "bf16"
    save: str = "recompute"
    dtype: torch.dtype = torch.float32
    pair: bool = False
    needs: tuple[frozenset[str], ...] | None = None  # of each rank


def cases(num_ranks: int) -> list[Case]:
    unequal = (33, 7, 0, 64)[:num_ranks]
    with_zero = (0, 50, 1, 0)[:num_ranks]
    only = tuple(frozenset({name}) for name in ("x", "w13", "topk_weights", "w2"))[:num_ranks]
    return [
        Case(unequal),
        Case(with_zero, save="preact"),
        Case(unequal, routing="first_rank", save="preact", pair=True),
        Case(with_zero, routing="none"),
        Case((0,) * num_ranks, save="preact"),
        Case(unequal, num_topk=16, dtype=torch.bfloat16, save="preact"),
        Case(unequal, num_topk=1, dtype=torch.float64),
        Case(unequal, precision="fp8"),
        Case(unequal, precision="mxfp8", save="preact"),
        Case(unequal, needs=only),
    ]


def global_inputs(case: Case) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(11)
    total, num_ranks = sum(case.tokens), len(case.tokens)
    high = {"random": E, "first_rank": E // num_ranks, "none": 0}[case.routing]
    weights_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    shapes = {"x": (total, H), "w13": (E, 2 * I, H), "w2": (E, H, I), "b13": (E, 2 * I), "b2": (E, H), "dy": (total, H)}
    inputs = {name: torch.randn(shape, generator=g).to(case.dtype) for name, shape in shapes.items()}
    inputs["topk_idx"] = torch.randint(-1, high, (total, case.num_topk), generator=g)
    inputs["topk_weights"] = torch.rand(total, case.num_topk, generator=g).to(weights_dtype)
    return inputs


def run(case: Case, rank: int, num_ranks: int, process_group=None) -> dict[str, torch.Tensor]:
    """This rank's y and gradients, computed with its share of the tokens and of the experts."""
    n = global_inputs(case)
    begin, end = (sum(case.tokens[:rank]), sum(case.tokens[: rank + 1])) if num_ranks > 1 else (0, sum(case.tokens))
    mine = {name: n[name][begin:end] for name in ("x", "dy", "topk_idx", "topk_weights")}
    local = slice(rank * E // num_ranks, (rank + 1) * E // num_ranks)
    split = (lambda w: tuple(w.chunk(2, 1))) if case.pair else (lambda w: (w,))
    buffer = SimpleNamespace(num_ranks=num_ranks, group=SimpleNamespace(process_group=process_group), mark_published=lambda token: None)
    problem = Problem(
        mine["x"],
        mine["topk_idx"],
        mine["topk_weights"],
        split(n["w13"][local]),
        n["w2"][local],
        split(n["b13"][local]),
        n["b2"][local],
        resolve_activation("swiglu_oai"),
        case.precision,
        case.save,
        buffer,
    )
    backend = ReferenceBackend(buffer)
    a, z = backend.gemm1(problem)
    needs = case.needs[rank] if case.needs and num_ranks > 1 else ALL
    grads = backend.backward(problem, mine["dy"], z, needs, WeightGrads(dtype=torch.promote_types(case.dtype, torch.float32)))
    out = {"y": backend.gemm2(problem, a)}
    for name, value in vars(grads).items():
        if value is not None:
            out[name] = torch.cat(value, 1) if isinstance(value, tuple) else value
    return out


def rank_main(rank: int, num_ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    try:
        torch.save([run(case, rank, num_ranks, dist.group.WORLD) for case in cases(num_ranks)], f"{folder}/{rank}.pt")
    except Exception:
        traceback.print_exc()
        raise
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    """Of every case: what each rank got. One set of processes for all cases."""
    folder = tmp_path_factory.mktemp("ep")
    mp.spawn(rank_main, (request.param, str(folder)), nprocs=request.param)
    return list(zip(*(torch.load(folder / f"{rank}.pt") for rank in range(request.param))))


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_same_bits_as_one_rank(results, one_thread):
    num_ranks = len(results[0])
    for case, ranks in zip(cases(num_ranks), results, strict=True):
        alone = run(case, 0, 1)
        for rank, out in enumerate(ranks):
            needed = {"y"} | {f"d{name}" for name in (case.needs[rank] if case.needs else ALL)}
            assert out.keys() == needed, case
            begin = sum(case.tokens[:rank])
            tokens, experts = slice(begin, begin + case.tokens[rank]), slice(rank * E // num_ranks, (rank + 1) * E // num_ranks)
            for name, value in out.items():
                share = tokens if name in ("y", "dx", "dtopk_weights") else experts
                assert torch.equal(value, alone[name][share]), f"{name} of rank {rank}: {case}"


def test_cases_exercise_what_they_name(results):
    num_ranks = len(results[0])
    for case, ranks in zip(cases(num_ranks), results, strict=True):
        rows = sum(float(out["y"].float().abs().sum()) for out in ranks)
        assert (rows == 0) == (case.routing == "none" or sum(case.tokens) == 0), case
        if case.routing == "first_rank":
            assert all((out["dw2"] == 0).all() for out in ranks[1:]) and (ranks[0]["dw2"] != 0).any()
