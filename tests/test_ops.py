"""The registered operators: opcheck, torch.compile(fullgraph) with the same bits as eager, fake shapes, no second derivative."""

from __future__ import annotations

import itertools
import shutil

import pytest
import torch
from api_inputs import E, H, I, K, T, count_calls, make_buffer, make_inputs

import deep_gemm
from deep_gemm.mega import buffer as buffer_module
from deep_gemm.mega import checks, ops


def call_of(inputs, buffer, save):
    options = checks.encode_options(buffer, "swiglu", None, None, save, None, None)
    w13, w3 = inputs.w13 if isinstance(inputs.w13, tuple) else (inputs.w13, None)
    b13, b3 = inputs.b13 if isinstance(inputs.b13, tuple) else (inputs.b13, None)
    return (inputs.x, inputs.topk_idx, inputs.topk_weights, w13, w3, inputs.w2, b13, b3, inputs.b2, buffer.handle, options)


def detached(call):
    return tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in call)


@pytest.mark.parametrize(("save", "pair", "bias"), [("recompute", False, False), ("preact", True, True)])
def test_opcheck(save, pair, bias):
    buffer = make_buffer()
    call = call_of(make_inputs(dtype=torch.float32, pair=pair, bias=bias).trainable(), buffer, save)
    torch.library.opcheck(ops.gemm1, call)
    proxy, a, z = ops.gemm1(*detached(call))
    torch.library.opcheck(ops.gemm2, (proxy.clone().requires_grad_(), a, *call))
    needs = "x topk_weights w13 w2" + (" b13 b2" if bias else "")
    dy = torch.randn(T, H)
    torch.library.opcheck(ops.backward, (dy, z, *detached(call), needs))
    targets = tuple(None if value is None else torch.zeros_like(value) for value in (call[3], call[4], call[5], *call[6:9]))
    torch.library.opcheck(ops.gemm1_main_grad, (*call, *targets))
    torch.library.opcheck(ops.backward_main_grad, (dy, z, *detached(call), needs, *targets))


class Layer(torch.nn.Module):
    """Plain elementwise work around the call; multiplications only, because compilers round others in their own way."""

    def __init__(self, inputs, buffer, **options):
        super().__init__()
        self.w13 = torch.nn.Parameter(inputs.w13.clone())
        self.w2 = torch.nn.Parameter(inputs.w2.clone())
        self.buffer, self.options = buffer, options

    def forward(self, x, topk_idx, topk_weights):
        return deep_gemm.mega_moe(x * 2, topk_idx, topk_weights, self.w13, self.w2, self.buffer, **self.options) * 0.5


def step(layer, module, inputs):
    leaves = inputs.trainable(("x", "topk_weights"))
    module.zero_grad()
    y = layer(leaves.x, leaves.topk_idx, leaves.topk_weights)
    y.sum().backward()
    return {"y": y.detach(), "x": leaves.x.grad, "topk_weights": leaves.topk_weights.grad, "w13": module.w13.grad, "w2": module.w2.grad}


def assert_same_bits(actual, expected):
    for name, value in expected.items():
        assert (value is None and actual[name] is None) or torch.equal(actual[name], value), name


needs_cxx = pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="inductor on CPU needs a C++ compiler")


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=needs_cxx)])
def test_compiled_layer_is_bitwise_eager(compiler):
    torch._dynamo.reset()
    for save in ("recompute", "preact") if compiler == "aot_eager" else ("preact",):
        inputs = make_inputs(dtype=torch.float32)
        module = Layer(inputs, make_buffer(), save=save, activation_clamp=1.5)
        expected = step(module, module, inputs)
        expected = {name: value.clone() for name, value in expected.items()}
        compiled = torch.compile(module, fullgraph=True, backend=compiler)
        assert_same_bits(step(compiled, module, inputs), expected)


def test_one_compilation_serves_other_numbers_of_tokens_and_buffers():
    torch._dynamo.reset()
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph

    first = Layer(make_inputs(dtype=torch.float32), make_buffer())
    for tokens in (T, T - 3, 5, 11):
        inputs = make_inputs(dtype=torch.float32, tokens=tokens)
        compiled = torch.compile(first, fullgraph=True, backend=counting)
        assert_same_bits(step(compiled, first, inputs), step(first, first, inputs))
    assert len(graphs) <= 2  # static, then dynamic
    second = Layer(make_inputs(dtype=torch.float32, seed=5), make_buffer())
    inputs = make_inputs(dtype=torch.float32, tokens=7)
    assert_same_bits(step(torch.compile(second, fullgraph=True, backend="aot_eager"), second, inputs), step(second, second, inputs))


def test_handle_keeps_compiled_graphs_of_other_settings_apart(monkeypatch):
    """torch.compile's cache on disk takes the next process's first buffer for this one's if their handles are the same."""
    handles = []
    for options in ({}, {"capacity_factor": 2.0}, {"tokens": T + 1}, {}):
        monkeypatch.setattr(buffer_module, "_numbers", itertools.count(1))
        handles.append(make_buffer(**options).handle)
    assert len(set(handles)) == 3 and handles[0] == handles[3]
    assert all(0 < handle < 2**63 for handle in handles)


def test_compiled_main_grads_accumulate():
    torch._dynamo.reset()
    inputs = make_inputs(dtype=torch.float32)
    main_grads = {"w13": torch.zeros(E, 2 * I, H), "w2": torch.zeros(E, H, I)}
    module = Layer(inputs, make_buffer(), main_grads=main_grads)
    results = []
    for layer in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        for tensor in main_grads.values():
            tensor.zero_()
        once = [step(layer, module, inputs) for _ in range(2)][-1]
        results.append({**once, **{f"main {name}": tensor.clone() for name, tensor in main_grads.items()}})
    assert results[0]["w13"] is None and results[0]["main w13"].any()
    assert_same_bits(results[1], results[0])


def test_compiled_no_grad_skips_preactivations(monkeypatch):
    torch._dynamo.reset()
    inputs, buffer = make_inputs(dtype=torch.float32), make_buffer()
    module = Layer(inputs, buffer, save="preact")
    calls = count_calls(monkeypatch, buffer)
    with torch.no_grad():
        y = torch.compile(module, fullgraph=True, backend="aot_eager")(*inputs.args[:3])
        assert torch.equal(y, module(*inputs.args[:3]))
    assert calls == {"gemm1": 2, "gemm2": 2}


def test_bad_input_to_a_compiled_layer_is_named():
    torch._dynamo.reset()
    inputs = make_inputs(dtype=torch.float32)
    module = Layer(inputs, make_buffer())
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"x.shape = \(23, 9\): expected \(T, 10\)"):
        compiled(inputs.x[:, :-1].contiguous(), inputs.topk_idx, inputs.topk_weights)
    inputs.topk_idx[3, 1] = E
    with pytest.raises(ValueError, match=r"topk_idx\[3, 1\] = 6, but num_experts = 6"):
        compiled(inputs.x, inputs.topk_idx, inputs.topk_weights)


def test_fake_tensors_get_the_shapes_of_real_ones():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for save in ("recompute", "preact"):
        buffer = make_buffer()
        call = detached(call_of(make_inputs(dtype=torch.bfloat16), buffer, save))
        real = ops.gemm1(*call)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = ops.gemm1(*(mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in call))
        for one, other in zip(real, fake, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    assert real[2].numel() and K


@pytest.mark.parametrize("main_grads", [False, True])
def test_second_derivative_is_refused(main_grads):
    inputs, buffer = make_inputs(), make_buffer()
    leaves = inputs.trainable()
    targets = {"w13": torch.zeros_like(inputs.w13), "w2": torch.zeros_like(inputs.w2)} if main_grads else None
    y = deep_gemm.mega_moe(*leaves.args, buffer, main_grads=targets)
    with pytest.raises(RuntimeError, match="mega_moe cannot be differentiated twice"):
        (dx,) = torch.autograd.grad(y.square().sum(), leaves.x, create_graph=True)
        dx.square().sum().backward()
