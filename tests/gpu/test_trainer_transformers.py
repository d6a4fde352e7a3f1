"""transformers' Qwen3-MoE on the CUDA backend: BF16 values and gradients no further from the FP32 model than the eager BF16 model's, under every
training option; the loss curve; EP over two GPUs with FSDP2, checkpoint and the example. In a rehearsal all of it on the CPU."""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers >= 5.7 (scripts/bench/carry_transformers.sh)")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "integrations"))

from hf_models import SEQUENCE, batch, loss_of, make_model, mean_gradients, relative

import deep_gemm.integrations.transformers as hf
from deep_gemm.integrations._buffers import release_buffers

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 64}
ROWS = 8


def model_on(device, implementation: str, dtype=torch.bfloat16, **options):
    return make_model(implementation, **(SIZES | options)).to(device=device, dtype=dtype)


def batches(device, count: int = 1) -> list[torch.Tensor]:
    return [batch(index, rows=ROWS).to(device) for index in range(count)]


def gradients(model) -> dict[str, torch.Tensor]:
    named = ((name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None)
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in named}


@functools.cache
def yardstick(device, count: int = 1) -> tuple[dict, dict]:
    """Gradients of the FP32 model of the rounded weights, and the errors of the eager BF16 model."""
    truth = mean_gradients(model_on(device, "eager").float(), batches(device, count))
    rounded = mean_gradients(model_on(device, "eager"), batches(device, count))
    return truth, {name: relative(rounded[name], truth[name]) for name in truth}


def assert_as_good_as_eager(made: dict, device, count: int = 1, names=None) -> None:
    truth, bounds = yardstick(device, count)
    assert made.keys() == (truth.keys() if names is None else names)
    errors = {name: (relative(made[name], truth[name]), bounds[name]) for name in made}
    wrong = {name: pair for name, pair in errors.items() if not pair[0] <= 1.5 * pair[1] + 2e-3}
    assert not wrong, f"(error, the eager model's): {wrong}"


@pytest.fixture(autouse=True)
def released():
    yield
    release_buffers()


def keep_experts(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in hf.SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {"context_fn": functools.partial(create_selective_checkpoint_contexts, keep_experts)}


@pytest.mark.parametrize("option", ["plain", "preact", "full", "selective", "compiled", "main_grads"])
def test_gradients(device, rehearsal, option):
    model = run = model_on(device, "mega_moe").train()
    hf.configure(model, num_max_tokens_per_rank=ROWS * SEQUENCE, save="preact" if option == "preact" else "recompute")
    if option in ("full", "selective"):
        model.gradient_checkpointing_enable({"use_reentrant": False, **(SELECTIVE if option == "selective" else {})})
    if option == "compiled":
        run = torch.compile(model, fullgraph=True, backend="aot_eager" if rehearsal else "inductor")
    if option == "main_grads":
        hf.enable_main_grads(model)
    loss_of(run, *batches(device)).backward()
    if option == "main_grads":
        hf.publish_main_grads(model)
    assert_as_good_as_eager(gradients(model), device)


@pytest.mark.parametrize("frozen", [("experts",), ("gate.weight",), ("embed_tokens", "experts", "gate.weight")])
def test_frozen_parameters(device, frozen):
    model = model_on(device, "mega_moe")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    loss_of(model, *batches(device)).backward()
    assert_as_good_as_eager(
        gradients(model), device, names={name for name, parameter in model.named_parameters() if parameter.requires_grad}
    )


def test_autocast_over_fp32_parameters(device):
    model = model_on(device, "mega_moe", torch.bfloat16).float()
    with torch.autocast(device.type, torch.bfloat16):
        loss = loss_of(model, *batches(device))
    loss.backward()
    assert_as_good_as_eager(gradients(model), device)


def test_fifty_steps_follow_the_eager_model(device):
    curves = {}
    for implementation in ("eager", "mega_moe"):
        model = model_on(device, implementation, torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        curve = curves[implementation] = []
        for step in range(50):
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model, batch(step, rows=ROWS).to(device))
            loss.backward()
            hf.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
    theirs, ours = (torch.tensor(curves[name]) for name in ("eager", "mega_moe"))
    assert ours[-1] < 0.7 * ours[0]
    # BF16 trajectories part slowly; in units of the loss at the start.
    apart = (ours - theirs).abs() / theirs[0]
    assert apart.mean() < 0.01 and apart.max() < 0.03, apart


def fsdp_and_ep_give_the_gradients_of_one_rank(device, folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    for fsdp, ep in ((1, world), (world, 1)):
        mesh = init_device_mesh(device.type, (fsdp, ep), mesh_dim_names=("fsdp", "ep"))
        model = model_on(device, "mega_moe").float().train()  # FP32 values of BF16 weights
        model.gradient_checkpointing_enable({"use_reentrant": False})
        hf.shard_experts(model, mesh["ep"], num_max_tokens_per_rank=ROWS * SEQUENCE)
        hf.apply_fsdp(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        loss_of(model, batches(device, world)[rank]).backward()
        assert_as_good_as_eager(gradients(model), device, world)


def main_gradients_of_sharded_experts(device, folder):
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (1, world), mesh_dim_names=("fsdp", "ep"))
    model = model_on(device, "mega_moe")
    hf.shard_experts(model, mesh["ep"], num_max_tokens_per_rank=ROWS * SEQUENCE)
    hf.enable_main_grads(model)
    hf.apply_fsdp(model, mesh)
    loss_of(model, batches(device, world)[dist.get_rank()]).backward()
    hf.publish_main_grads(model, divide_factor=world)
    assert_as_good_as_eager(gradients(model), device, world)


def the_example_resumes_at_another_ep_size(device, folder):
    spec = importlib.util.spec_from_file_location("finetune_qwen3_moe", ROOT / "examples" / "finetune_qwen3_moe.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    train = lambda *arguments: torch.tensor(example.train(example.arguments(list(arguments)), device))
    straight = train("--ep", "2", "--steps", "6")
    first = train("--ep", "2", "--steps", "4", "--save", f"{folder}/checkpoint")
    resumed = train("--ep", "1", "--steps", "2", "--resume", f"{folder}/checkpoint")
    torch.testing.assert_close(torch.cat((first, resumed)), straight, rtol=2e-2, atol=0)


SCENARIOS = (fsdp_and_ep_give_the_gradients_of_one_rank, main_gradients_of_sharded_experts, the_example_resumes_at_another_ep_size)


def rank_main(rank: int, size: int, device_type: str, folder: str) -> None:
    device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", rank)
    if device_type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    else:
        torch.set_num_threads(1)
    backend = "gloo" if device_type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    reports = {}
    for scenario in SCENARIOS:
        try:
            scenario(device, folder)
            reports[scenario.__name__] = ""
        except BaseException:  # noqa: BLE001 - reported by the test
            reports[scenario.__name__] = traceback.format_exc()
        torch.save(reports, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks(rehearsal, tmp_path):
    if not rehearsal and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this machine shows {torch.cuda.device_count()}")
    mp.spawn(rank_main, (2, "cpu" if rehearsal else "cuda", str(tmp_path)), nprocs=2)
    reports = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert all(len(report) == len(SCENARIOS) for report in reports)
    failures = [f"{name}, rank {rank}:\n{text}" for rank, report in enumerate(reports) for name, text in report.items() if text]
    assert not failures, "\n".join(failures)
