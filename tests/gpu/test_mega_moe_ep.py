"""Mega MoE in real processes, a GPU each, over torch symmetric memory: results, equal bits under skew, fault texts, sub-groups, the module.

R = 2 needs two GPUs. R = 1 goes through a process group of one and runs on one GPU. One set of processes runs all scenarios in order; each
scenario reports on its own. The rehearsal on the CPU runs them over gloo and the reference backend.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from process_support import OneOfRanks, Process, in_group, join

import deep_gemm
from deep_gemm.nn import MegaMoE
from deep_gemm.testing import assert_bitwise_equal, assert_close
from deep_gemm.testing.moe_cases import compare, torch_outputs, truth
from deep_gemm.testing.torch_path import torch_moe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

TIMEOUT_S = 5  # DG_TIMEOUT_S of the processes: what the late-peer scenario waits for
JOIN_S = 240


def results_match_the_oracle(process: Process) -> None:
    shapes = ({}, {"hidden": 2048, "intermediate_hidden": 768, "num_experts": 128, "num_topk": 8, "tokens": (512, 384)})
    for shape in shapes if process.on_gpu else shapes[:1]:
        for routing in ("uniform", "zipf1", "idle-rank", "one-hot-rank", "holes", "all-masked"):
            for save in ("recompute", "preact"):
                case = process.case(**shape, routing=routing, save=save)
                ranks = OneOfRanks(process, case)
                exact, yardstick = truth(case, ranks.inputs), torch_outputs(case, ranks.inputs)
                mine = (process.share(case, tensors) for tensors in (exact, yardstick))
                rows, faults = compare(case, ranks.outputs(), *mine)
                process.accuracy += [{**row, "tensor": f"{row['tensor']}[{process.rank}]"} for row in rows]
                assert not faults, "\n".join(faults)


def rank_without_tokens_takes_part(process: Process) -> None:
    case = process.case(tokens=(0, 64) if process.size > 1 else (0,))
    ranks = OneOfRanks(process, case)
    rows, faults = compare(case, ranks.outputs(), *(process.share(case, made(case, ranks.inputs)) for made in (truth, torch_outputs)))
    assert rows and not faults, "\n".join(faults)


def bits_do_not_depend_on_who_comes_first(process: Process) -> None:
    ranks = OneOfRanks(process, process.case(routing="zipf1", tokens=(300, 211)))
    first = ranks.outputs()
    for run in range(10):
        if process.on_gpu and run % process.size == process.rank:
            torch.cuda._sleep(20_000_000)
        for name, tensor in ranks.outputs().items():
            assert_bitwise_equal(tensor, first[name], name=f"{name}, run {run}")


def torch_path_over_ranks_equals_one_rank(process: Process) -> None:
    case = process.case()
    ranks = OneOfRanks(process, case)
    x, idx, p, w13, w2, _ = ranks.arguments(process.rank)
    leaves = [t.detach().clone().requires_grad_() for t in (x, p, w13, w2)]
    y = torch_moe(leaves[0], idx, leaves[1], *leaves[2:], group=dist.group.WORLD)
    grads = torch.autograd.grad(y, leaves, ranks.inputs.dy[process.rank])
    whole = process.share(case, torch_outputs(case, ranks.inputs))
    for name, actual in zip(("y", "dx", "dp", "dw13", "dw2"), (y.detach(), *grads), strict=True):
        assert_close(actual, whole[name], rel_frobenius=1e-3, row_floor=1.0, name=name)


def module_trains_through_autograd(process: Process) -> None:
    case = process.case()
    ranks = OneOfRanks(process, case)
    x, idx, p, w13, w2, buffer = ranks.arguments(process.rank)
    layer = MegaMoE(case.hidden, case.intermediate_hidden, case.num_experts, case.num_topk, buffer=buffer)
    with torch.no_grad():
        layer.w13.copy_(w13)
        layer.w2.copy_(w2)
    x, p = x.detach().clone().requires_grad_(), p.detach().clone().requires_grad_()
    layer(x, idx, p).backward(ranks.inputs.dy[process.rank])
    expected = ranks.outputs()
    for name, grad in (("dx", x.grad), ("dp", p.grad), ("dw13", layer.w13.grad), ("dw2", layer.w2.grad)):
        assert_close(grad, expected[name], rel_frobenius=2e-3, name=name)


def different_settings_raise_on_every_rank(process: Process) -> None:
    if process.size == 1:
        return
    case = process.case()
    with pytest.raises(ValueError, match=r"num_max_tokens_per_rank .*rank 0 has 64, rank 1 has 65"):
        deep_gemm.get_symm_buffer_for_mega_moe(
            dist.group.WORLD,
            case.num_experts,
            64 + process.rank,
            case.num_topk,
            case.hidden,
            case.intermediate_hidden,
            device=process.device,
        )


def late_peer_is_named(process: Process) -> None:
    """Last scenario: the buffer of rank 0 is useless afterwards, a new one works."""
    if process.size == 1 or not process.on_gpu:
        return
    ranks = OneOfRanks(process, process.case())
    if process.rank == 0:
        deep_gemm.mega_moe_fwd(*ranks.arguments(0))
        with pytest.raises(deep_gemm.PeerTimeoutError, match=r"rank 0 waited 5 s .* for rank 1"):
            ranks.buffers[0].check()
    dist.barrier()
    OneOfRanks(process, process.case()).outputs()


SCENARIOS = [
    results_match_the_oracle,
    rank_without_tokens_takes_part,
    bits_do_not_depend_on_who_comes_first,
    torch_path_over_ranks_equals_one_rank,
    module_trains_through_autograd,
    different_settings_raise_on_every_rank,
    late_peer_is_named,
]


def _worker(rank: int, size: int, device_type: str, folder: str) -> None:
    outcome: dict[str, str | None] = {}
    with in_group(rank, size, device_type, folder, timeout_s=TIMEOUT_S) as process:
        for scenario in SCENARIOS:
            try:
                scenario(process)
                outcome[scenario.__name__] = None
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - reported by the test of this scenario
                outcome[scenario.__name__] = f"rank {rank}:\n{traceback.format_exc()}"
            torch.save((outcome, process.accuracy), f"{folder}/outcome{rank}.pt")


@pytest.fixture(scope="module", params=[1, 2], ids=["R1", "R2"])
def outcomes(request, rehearsal, accuracy, tmp_path_factory):
    size = request.param
    if not rehearsal and torch.cuda.device_count() < size:
        pytest.skip(f"R = {size} needs {size} GPUs, this machine shows {torch.cuda.device_count()}")
    folder = Path(tmp_path_factory.mktemp(f"ep{size}"))
    context = mp.spawn(_worker, (size, "cpu" if rehearsal else "cuda", str(folder)), nprocs=size, join=False)
    failure = join(context, JOIN_S)
    made = [torch.load(folder / f"outcome{rank}.pt") if (folder / f"outcome{rank}.pt").exists() else ({}, []) for rank in range(size)]
    for _, rows in made:
        accuracy.add("mega-moe", rows)
    return [outcome for outcome, _ in made], failure


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_processes(scenario, outcomes):
    by_rank, failure = outcomes
    for rank, outcome in enumerate(by_rank):
        assert scenario in outcome, f"rank {rank} did not get to it: {failure}"
        assert outcome[scenario] is None, outcome[scenario]
