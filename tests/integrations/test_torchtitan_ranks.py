"""TorchTitan's models with Mega MoE against their own experts, in worlds of 1, 2 and 4 gloo processes, through TorchTitan's own parallelize.

FP32 (TorchTitan's dispatch and combine around FP32 experts): loss, logits and every gradient to 1e-5; expert, tensor, sharded and replicated
parallelism thinned. BF16: no further from FP32 than TorchTitan's experts. Accumulation, clipping, frozen parts, activation checkpointing,
compilation, 50 steps, checkpoints across EP sizes and to and from the unmodified model. One set of processes a world runs its scenarios.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

pytest.importorskip("torchtitan", reason="torchtitan needs Python >= 3.11")

import titan_checks as checks
from titan_support import Setup, Shape

QWEN, DEEPSEEK = Setup(), Setup(model="deepseek_v3")
EP2, SELECTIVE = Setup(ep=2), Setup(ac="selective")
FEW_EXPERTS = Shape(num_experts=2)  # fewer than ranks: TorchTitan shards the experts' second dimension

equal, bf16, clip = checks.equals_its_own_experts, checks.is_as_accurate_as_its_own_experts_in_bf16, checks.clips_by_the_global_norm
runs_again, balance, checkpoint = checks.checkpointing_runs_again, checks.balances_its_experts, checks.checkpoint_passes_to_others
trains = checks.trains_like_its_own_experts
SCENARIOS: dict[int, dict[str, partial]] = {
    1: {
        "whole model": partial(equal, replace(QWEN, parallel=False)),
        "whole model, shared expert, preact": partial(equal, replace(DEEPSEEK, parallel=False, options={"save": "preact"})),
        "FSDP of one, spmd_types": partial(equal, replace(QWEN, spmd_backend="spmd_types")),
        "bf16": partial(bf16, QWEN),
        "bf16, shared expert": partial(bf16, DEEPSEEK),
        "full checkpointing": partial(runs_again, replace(QWEN, ac="full"), (2, 2)),
        "selective, not told": partial(runs_again, SELECTIVE, (2, 2)),
        "selective, told": partial(runs_again, replace(SELECTIVE, keep_activations=True), (1, 1)),
        "selective, output alone": partial(runs_again, replace(SELECTIVE, keep_activations=False), (2, 1)),
        "compiled": partial(equal, replace(QWEN, compile=True)),
        "compiled, selective": partial(equal, replace(DEEPSEEK, compile=True, ac="selective", keep_activations=True)),
        "frozen router": partial(equal, replace(QWEN, frozen="router")),
        "50 steps": partial(trains, replace(QWEN, dtype="bfloat16"), tolerance=0.1),
        "token bound": partial(checks.refuses_too_many_tokens, QWEN),
    },
    2: {
        "EP2": partial(equal, EP2),
        "EP2, shared expert, full_dtensor": partial(equal, replace(DEEPSEEK, ep=2, spmd_backend="full_dtensor")),
        "EP1, sharded": partial(equal, QWEN),
        "TP2": partial(equal, replace(QWEN, tp=2)),
        "TP2, EP2": partial(equal, replace(DEEPSEEK, tp=2, ep=2)),
        "bf16, EP2": partial(bf16, EP2),
        "accumulation": partial(equal, EP2, micro_batches=2),
        "clip": partial(clip, EP2),
        "frozen experts": partial(equal, replace(EP2, frozen="inner_experts")),
        "frozen up projection, compiled": partial(equal, replace(EP2, frozen="w3_EFD", compile=True)),
        "selective, told, EP2": partial(runs_again, replace(SELECTIVE, ep=2, keep_activations=True), (1, 1)),
        "selective, output alone, EP2": partial(runs_again, replace(SELECTIVE, ep=2, keep_activations=False), (2, 1)),
        # With EP, TorchTitan's own experts too fail to compile under checkpointing with torch 2.13 (DTensor parameters in the region).
        "full checkpointing, compiled, EP1": partial(equal, replace(QWEN, ac="full", compile=True)),
        "balance": partial(balance, replace(DEEPSEEK, ep=2)),
        "50 steps, EP2": partial(trains, replace(EP2, dtype="bfloat16", balanced=True), tolerance=0.01),
        "token bound, EP2": partial(checks.refuses_too_many_tokens, EP2),
    },
    4: {
        "EP2, FSDP2": partial(equal, replace(DEEPSEEK, ep=2)),
        "EP4": partial(equal, replace(QWEN, ep=4)),
        "EP2, replicated": partial(equal, replace(QWEN, ep=2, dp_replicate=2)),
        "EP4, TP2": partial(equal, replace(QWEN, ep=4, tp=2)),
        "few experts": partial(equal, replace(QWEN, ep=2, shape=FEW_EXPERTS)),
        "bf16, EP2, FSDP2": partial(bf16, replace(QWEN, ep=2)),
        "clip, EP2, FSDP2": partial(clip, replace(QWEN, ep=2)),
        "EP4 to EP2 to EP1": partial(checkpoint, replace(QWEN, ep=4), [replace(QWEN, ep=2), QWEN], "mega-moe"),
        "own to Mega MoE": partial(checkpoint, replace(DEEPSEEK, experts="own", ep=2), [replace(DEEPSEEK, ep=4)], "from-own"),
        "Mega MoE to own": partial(
            checkpoint, replace(DEEPSEEK, ep=2), [replace(DEEPSEEK, experts=own, ep=ep) for own, ep in (("own", 4), ("own", 1))], "to-own"
        ),
    },
}
# TorchTitan's default backend, whose FSDP is in torch >= 2.14. Its meshes serve one model a process.
SPMD_TYPES = {
    "EP2": replace(EP2, spmd_backend="spmd_types"),
    "TP2, EP2, shared expert": replace(DEEPSEEK, tp=2, ep=2, spmd_backend="spmd_types"),
    "TP2, types checked": replace(QWEN, tp=2, spmd_backend="spmd_types", typechecking=True),
    "EP2, types checked": replace(EP2, spmd_backend="spmd_types", typechecking=True),
    "EP2, compiled, selective": replace(EP2, spmd_backend="spmd_types", compile=True, ac="selective", keep_activations=True),
    "EP2, compiled, full": replace(EP2, spmd_backend="spmd_types", compile=True, ac="full"),
}


def reports_of(world: int, scenarios: dict[str, partial], folder: Path) -> list[dict[str, str]]:
    """Processes of a server that has imported TorchTitan once: importing takes longer than the scenarios."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    multiprocessing.get_context("forkserver").set_forkserver_preload(["titan_checks"])
    mp.start_processes(checks.rank_main, (world, "cpu", str(folder), scenarios), nprocs=world, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    made: dict[int, list[dict[str, str]]] = {}

    def of(world: int) -> list[dict[str, str]]:
        if world not in made:
            made[world] = reports_of(world, SCENARIOS[world], tmp_path_factory.mktemp(f"titan{world}"))
        return made[world]

    return of


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, scenarios in SCENARIOS.items() for name in scenarios])
def test_scenario(world, name, reports):
    for rank, report in enumerate(reports(world)):
        assert report[name] == "", f"rank {rank}:\n{report[name]}"


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="FSDP of torch < 2.14 does not know TorchTitan's spmd_types backend")
@pytest.mark.parametrize("name", SPMD_TYPES)
def test_default_spmd_backend(name, tmp_path):
    for rank, report in enumerate(reports_of(2, {name: partial(equal, SPMD_TYPES[name])}, tmp_path)):
        assert report[name] == "", f"rank {rank}:\n{report[name]}"
