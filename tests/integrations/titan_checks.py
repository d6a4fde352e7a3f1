"""What a TorchTitan model with Mega MoE is held to: one function a property, each on every rank of the world that it runs in."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from titan_support import LENGTH, SEQUENCES, Run, Setup, batches, whole
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.base import ModelWrapper

from deep_gemm.integrations._buffers import release_buffers
from deep_gemm.integrations.torchtitan import MegaMoeRoutedExperts

FP32_TOLERANCE = 1e-5  # relative Frobenius, of every gradient
BATCH = next(batches())


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def eager(setup: Setup) -> Run:
    """TorchTitan's own experts, the whole model and the whole batch on this rank."""
    plain = {
        "experts": "own",
        "parallel": False,
        "ep": 1,
        "tp": 1,
        "dp_replicate": 1,
        "ac": None,
        "keep_activations": None,
        "compile": False,
    }
    return Run(replace(setup, **plain, typechecking=False))


def pair(setup: Setup, *, micro_batches: int = 1) -> tuple[Run, Run]:
    """The eager FP32 model and the one of `setup`, same weights, after one forward and backward of the same batch."""
    expected = eager(replace(setup, dtype="float32"))
    actual = Run(setup, expected.state())
    expected.loss, actual.loss = expected.backward(BATCH), actual.backward(BATCH, micro_batches=micro_batches)
    return expected, actual


def assert_same_gradients(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    worst = max((relative(actual[name], value), name) for name, value in expected.items())
    assert worst[0] <= FP32_TOLERANCE, worst


def equals_its_own_experts(setup: Setup, **options) -> None:
    expected, actual = pair(setup, **options)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=FP32_TOLERANCE, atol=0)
    if not options and setup.tp == 1:  # else of a part of the rows or of the vocabulary
        logits = actual.logits.to_local() if isinstance(actual.logits, DTensor) else actual.logits
        assert relative(logits, actual.share(expected.logits)) <= FP32_TOLERANCE
    assert_same_gradients(actual.gradients(), expected.gradients())
    if setup.frozen is not None:
        assert not any(setup.frozen in name for name in actual.gradients())


def is_as_accurate_as_its_own_experts_in_bf16(setup: Setup) -> None:
    """Against FP32, on average over the parameters, and near each other in every one. Small ones (norms) scatter: a few rounded numbers."""
    setup = replace(setup, dtype="bfloat16", balanced=True)
    truth, actual = pair(setup)
    own = Run(replace(setup, experts="own"), truth.state())
    own.backward(BATCH)
    exact, theirs, mine = truth.gradients(), own.gradients(), actual.gradients()
    errors = torch.tensor([[relative(made[name], exact[name]) for name in exact] for made in (mine, theirs)])
    assert errors[0].mean() <= 1.1 * errors[1].mean(), errors.mean(1)
    apart = max((relative(mine[name], theirs[name]), name) for name in exact)
    assert apart[0] <= 3e-2, apart


def clips_by_the_global_norm(setup: Setup) -> None:
    expected, actual = pair(setup)
    norm = torch.stack([grad.norm() for grad in expected.gradients().values()]).norm()
    assert norm > 1  # so that clipping does something
    torch.testing.assert_close(whole(actual.clip(0.5)), norm, rtol=FP32_TOLERANCE, atol=0)
    assert_same_gradients(actual.gradients(), {name: grad * 0.5 / norm for name, grad in expected.gradients().items()})


def count_calls(model: torch.nn.Module) -> Counter:
    """Calls of the backend's parts from now on, by name."""
    calls: Counter = Counter()
    buffers = {module.buffer for module in model.modules() if isinstance(module, MegaMoeRoutedExperts)}
    (backend,) = {buffer.backend(buffer.backend_name) for buffer in buffers}

    def counted(name: str, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for name in ("gemm1", "gemm2", "backward"):
        setattr(backend, name, counted(name, getattr(type(backend), name).__get__(backend)))
    return calls


def checkpointing_runs_again(setup: Setup, forwards: tuple[int, int]) -> None:
    """forwards: calls of GEMM 1 and GEMM 2 in units of layers. The same bits as without checkpointing."""
    plain = Run(replace(setup, ac=None, keep_activations=None))
    plain.backward(BATCH)
    actual = Run(setup, plain.state())
    calls = count_calls(actual.model)
    actual.backward(BATCH)
    layers = setup.shape.num_layers
    assert calls == {"gemm1": forwards[0] * layers, "gemm2": forwards[1] * layers, "backward": layers}
    expected, gradients = plain.gradients(), actual.gradients()
    assert all(torch.equal(gradients[name], value) for name, value in expected.items())


def trains_like_its_own_experts(setup: Setup, tolerance: float, lr: float = 3e-3, steps: int = 50) -> None:
    """AdamW with clipping. tolerance: of the loss at every step, relative; a quarter of it on average. A free router sends some tokens to
    other experts after other rounding, a balanced one does not.
    """
    curves = {}
    for experts in ("own", "mega_moe"):
        run = Run(replace(setup, experts=experts))
        run.make_optimizer(lr)
        curves[experts] = torch.tensor([run.step(batch) for _, batch in zip(range(steps), batches())])
    own, mine = curves["own"], curves["mega_moe"]
    assert own[-5:].mean() < 0.65 * own[:5].mean()
    apart = (mine - own).abs() / own
    assert apart.max() <= tolerance and apart.mean() <= tolerance / 4, (apart.max(), apart.mean())


def balances_its_experts(setup: Setup) -> None:
    """Counts and the selection bias, which TorchTitan's optimiser hook makes from the counts of all ranks."""
    reference = eager(setup)
    actual = Run(setup, reference.state())
    for run in (reference, actual):
        run.make_optimizer()
        for _, batch in zip(range(3), batches()):
            run.step(batch)
        run.backward(BATCH)
    expected, state = reference.state(), actual.state()
    names = [name for name in expected if name.endswith("expert_bias_E")]
    assert names and all(expected[name].abs().max() > 0 for name in names)
    for name in names:
        torch.testing.assert_close(state[name], expected[name])
    for mine, theirs in zip(counters(actual), counters(reference), strict=True):
        assert torch.equal(mine, theirs) and mine.sum() == SEQUENCES * LENGTH * setup.shape.top_k


def counters(run: Run) -> list[torch.Tensor]:
    """Tokens per expert over all ranks."""
    counts = [buffer for name, buffer in run.model.named_buffers() if name.endswith("tokens_per_expert_E")]
    counts = [(count.to_local() if isinstance(count, DTensor) else count).detach().clone() for count in counts]
    if run.setup.parallel:
        for count in counts:
            dist.all_reduce(count)
    return counts


def refuses_too_many_tokens(setup: Setup) -> None:
    run = Run(replace(setup, options={"num_max_tokens_per_rank": 5}))
    with pytest.raises(ValueError, match=r"T = \d+ tokens, expected at most num_max_tokens_per_rank = 5"):
        run.backward(BATCH)


def checkpoint_passes_to_others(setup: Setup, others: list[Setup], folder: str) -> None:
    """Saved with torch.distributed.checkpoint as TorchTitan saves, after steps with AdamW; `others` go on as the saved run does."""
    run = Run(setup)
    run.make_optimizer()
    stream = batches()
    for _ in range(2):
        run.step(next(stream))
    dcp.save({"model": ModelWrapper(run.model), "optimizer": run.optimizers}, checkpoint_id=folder)
    expected = run.state() | run.optimizer_state()
    after = [next(stream) for _ in range(2)]
    losses = [run.step(batch) for batch in after]
    for other in others:
        resumed = Run(other, seed=1)
        resumed.make_optimizer()
        dcp.load({"model": ModelWrapper(resumed.model), "optimizer": resumed.optimizers}, checkpoint_id=folder)
        state = resumed.state() | resumed.optimizer_state()
        assert state.keys() == expected.keys() and all(torch.equal(state[name], value) for name, value in expected.items())
        torch.testing.assert_close([resumed.step(batch) for batch in after], losses, rtol=5e-3, atol=0)


def rank_main(rank: int, world: int, device: str, folder: str, scenarios: dict[str, Callable[[], None]]) -> None:
    """Runs the scenarios in `folder` and leaves {name: "" or traceback} in `folder`/<rank>.pt."""
    os.chdir(folder)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    reports = {}
    for name, scenario in scenarios.items():
        try:
            scenario()
            reports[name] = ""
        except BaseException:  # noqa: BLE001 - reported by the test of this scenario
            reports[name] = traceback.format_exc()
        release_buffers()
        torch._dynamo.reset()
    torch.save(reports, f"{rank}.pt")
    os._exit(0)  # without waiting for a peer that a failed scenario left in a collective
