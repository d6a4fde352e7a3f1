"""TorchTitan's models with Mega MoE on GPUs: no further from FP32 than TorchTitan's experts, checkpointing, compilation, a loss curve.

A world of one on one GPU; EP2 on two. Skipped without the torchtitan package. The rehearsal on the CPU runs the same over gloo.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

pytest.importorskip("torchtitan", reason="torchtitan is not installed (pip install torchtitan==0.3.0 triton)")
pytest.importorskip("torchtitan.distributed.fsdp", reason="torchtitan 0.3.0 does not import with this torch", exc_type=ImportError)
sys.path.append(str(Path(__file__).parents[1] / "integrations"))

import titan_checks as checks
from titan_support import Setup, Shape

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]

SHAPE = Shape(dim=256, hidden_dim=128, num_experts=16, top_k=4)
NAMES = ("bf16", "bf16, shared expert", "full checkpointing", "selective, told", "compiled", "50 steps")


def scenarios(device: str, world: int) -> dict[str, partial]:
    base = Setup(device=device, dtype="bfloat16", ep=world, shape=SHAPE)
    told = replace(base, ac="selective", keep_activations=True)
    return {
        "bf16": partial(checks.is_as_accurate_as_its_own_experts_in_bf16, base),
        "bf16, shared expert": partial(checks.is_as_accurate_as_its_own_experts_in_bf16, replace(base, model="deepseek_v3")),
        "full checkpointing": partial(checks.checkpointing_runs_again, replace(base, ac="full"), (2, 2)),
        "selective, told": partial(checks.checkpointing_runs_again, told, (1, 1)),
        "compiled": partial(checks.is_as_accurate_as_its_own_experts_in_bf16, replace(base, compile=True)),
        "50 steps": partial(checks.trains_like_its_own_experts, replace(base, balanced=True), tolerance=0.02, lr=1e-4),
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["EP1", "EP2"])
def reports(request, tmp_path_factory, device):
    world = request.param
    if device.type == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"{world} GPUs are needed, {torch.cuda.device_count()} found")
    folder = tmp_path_factory.mktemp(f"titan{world}")
    mp.spawn(checks.rank_main, (world, device.type, str(folder), scenarios(device.type, world)), nprocs=world)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


@pytest.mark.parametrize("name", NAMES)
def test_scenario(name, reports):
    for rank, report in enumerate(reports):
        assert report[name] == "", f"rank {rank}:\n{report[name]}"
