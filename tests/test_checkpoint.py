"""Activation checkpointing: what a checkpointed block runs again. GEMM 2 and the combine are not, where torch can stop early."""

from __future__ import annotations

import pytest
import torch
from api_inputs import E, H, I, count_calls, make_buffer, make_inputs
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import deep_gemm
from deep_gemm.mega import ops

LAYERS = 3


class Block(torch.nn.Module):
    """Norm, router, experts, residual: the end of a transformer block. A post-norm saves y, so the experts' output is needed again."""

    def __init__(self, buffer, topk_idx, *, save, post_norm=False):
        super().__init__()
        self.norm, self.post_norm = torch.nn.RMSNorm(H), torch.nn.RMSNorm(H) if post_norm else torch.nn.Identity()
        self.gate = torch.nn.Linear(H, E, bias=False)
        self.w13 = torch.nn.Parameter(torch.randn(E, 2 * I, H) * 0.3)
        self.w2 = torch.nn.Parameter(torch.randn(E, H, I) * 0.3)
        self.buffer, self.topk_idx, self.save = buffer, topk_idx, save

    def forward(self, x):
        h = self.norm(x)
        p = self.gate(h).softmax(-1).gather(1, self.topk_idx)
        return x + self.post_norm(deep_gemm.mega_moe(h, self.topk_idx, p, self.w13, self.w2, self.buffer, save=self.save))


def run(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


def blocks(buffer, **options):
    torch.manual_seed(0)
    inputs = make_inputs(dtype=torch.float32, holes=False)
    return inputs.x, torch.nn.ModuleList(Block(buffer, inputs.topk_idx, **options) for _ in range(LAYERS))


def checkpointed(layers, **options):
    def forward(x):
        for layer in layers:
            x = checkpoint(layer, x, **options)
        return x

    return forward


class Model(torch.nn.Module):
    def __init__(self, layers, forward=None):
        super().__init__()
        self.layers, self.run = layers, forward

    def forward(self, x):
        return self.run(x) if self.run else torch.nn.Sequential(*self.layers)(x)


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize(
    ("options", "post_norm", "gemm2"),
    [
        ({"use_reentrant": False}, False, LAYERS),  # recomputation stops after A
        ({"use_reentrant": False}, True, 2 * LAYERS),  # the post-norm saves y, so B has to run
        ({"use_reentrant": True}, False, 2 * LAYERS),  # reentrant checkpointing always runs the whole block
    ],
)
def test_what_is_run_again(options, post_norm, gemm2, save, monkeypatch):
    buffer = make_buffer()
    x, layers = blocks(buffer, save=save, post_norm=post_norm)
    expected = run(Model(layers), x)
    calls = count_calls(monkeypatch, buffer)
    actual = run(Model(layers, checkpointed(layers, **options)), x)
    assert calls == {"gemm1": 2 * LAYERS, "gemm2": gemm2, "backward": LAYERS}
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_checkpoint_wrapper_of_trainers(monkeypatch):
    buffer = make_buffer()
    x, layers = blocks(buffer, save="preact")
    expected = run(Model(layers), x)
    calls = count_calls(monkeypatch, buffer)
    wrapped = torch.nn.ModuleList(checkpoint_wrapper(layer, preserve_rng_state=False) for layer in layers)
    actual = run(Model(wrapped), x)
    assert calls == {"gemm1": 2 * LAYERS, "gemm2": LAYERS, "backward": LAYERS}
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_selective_checkpointing_may_keep_the_experts(monkeypatch):
    buffer = make_buffer()
    x, layers = blocks(buffer, save="preact")
    expected = run(Model(layers), x)
    calls = count_calls(monkeypatch, buffer)

    def keep(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in (ops.gemm1, ops.gemm2) else CheckpointPolicy.PREFER_RECOMPUTE

    context = lambda: create_selective_checkpoint_contexts(keep)
    actual = run(Model(layers, checkpointed(layers, use_reentrant=False, context_fn=context)), x)
    assert calls == {"gemm1": LAYERS, "gemm2": LAYERS, "backward": LAYERS}
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_compiled_checkpointed_block(monkeypatch):
    torch._dynamo.reset()
    buffer = make_buffer()
    x, layers = blocks(buffer, save="recompute")
    expected = run(Model(layers), x)
    calls = count_calls(monkeypatch, buffer)
    compiled = [torch.compile(layer, fullgraph=True, backend="aot_eager") for layer in layers]
    actual = run(Model(layers, checkpointed(compiled, use_reentrant=False)), x)
    assert calls["backward"] == LAYERS and calls["gemm1"] == 2 * LAYERS
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_compiled_block_with_checkpoint_inside_drops_gemm2(monkeypatch):
    torch._dynamo.reset()
    buffer = make_buffer()
    x, layers = blocks(buffer, save="recompute")
    expected = run(Model(layers), x)
    calls = count_calls(monkeypatch, buffer)
    model = Model(layers, torch.compile(checkpointed(layers, use_reentrant=False), fullgraph=True, backend="aot_eager"))
    actual = run(model, x)
    assert calls["backward"] == LAYERS and calls["gemm1"] == 2 * LAYERS and calls["gemm2"] == LAYERS
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
