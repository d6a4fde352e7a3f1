"""The public calls on the reference backend: values and gradients against autograd of the plain formula in FP64, options, dtypes, targets of
weight gradients, what the state owns, the forward-only names, and an import that needs nothing."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from api_inputs import E, H, I, K, T, make_buffer, make_inputs, plain_moe

import deep_gemm
from deep_gemm.errors import BackendUnavailable

NAMES = ("x", "topk_weights", "w13", "w2", "b13", "b2")


def truth(inputs, dy, **activation):
    leaves = inputs.trainable()
    y = plain_moe(leaves, **activation)
    y.backward(dy)
    return y.detach(), leaves.gradients()


def by_name(gradients) -> dict:
    values = dict(zip(NAMES, (*gradients, gradients.db13, gradients.db2)))
    return {name: torch.cat(value, 1) if isinstance(value, tuple) else value for name, value in values.items() if value is not None}


def assert_all_close(actual: dict, expected: dict, **tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pair", [False, True])
def test_fwd_and_bwd_match_autograd_of_the_formula(pair, bias, save):
    inputs, buffer = make_inputs(pair=pair, bias=bias), make_buffer()
    dy = torch.randn(T, H, dtype=torch.float64)
    y, expected = truth(inputs, dy)
    actual, state = deep_gemm.mega_moe_fwd(*inputs.args, buffer, **inputs.biases, save=save)
    gradients = deep_gemm.mega_moe_bwd(dy, state, wgrad_dtype=torch.float64)
    torch.testing.assert_close(actual, y)
    assert_all_close(by_name(gradients), expected)
    assert isinstance(gradients.dw13, tuple) == pair
    dx, _, _, dw2 = gradients  # four, with biases or without
    assert dx is gradients.dx and dw2 is gradients.dw2


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_of_the_caller_changes_no_bit(dtype, save):
    inputs, buffer, dy = make_inputs(dtype=dtype), make_buffer(), torch.randn(T, H).to(dtype)
    results = []
    for enabled in (False, True):
        leaves = inputs.trainable()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = deep_gemm.mega_moe(*leaves.args, buffer, save=save)
            oracle = deep_gemm.reference.forward(*inputs.args)
            y.backward(dy)
            _, state = deep_gemm.mega_moe_fwd(*inputs.args, buffer, save=save)
            plain = by_name(deep_gemm.mega_moe_bwd(dy, state))
        assert oracle.dtype == torch.float32
        results.append({"y": y.detach(), "oracle": oracle, **leaves.gradients(), **{f"plain {name}": value for name, value in plain.items()}})
    assert all(torch.equal(results[0][name], value) for name, value in results[1].items())


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pair", [False, True])
def test_mega_moe_is_differentiable(pair, bias, save):
    inputs, buffer = make_inputs(pair=pair, bias=bias), make_buffer()
    dy = torch.randn(T, H, dtype=torch.float64)
    y, expected = truth(inputs, dy)
    leaves = inputs.trainable()
    actual = deep_gemm.mega_moe(*leaves.args, buffer, **leaves.biases, save=save)
    actual.backward(dy)
    torch.testing.assert_close(actual.detach(), y)
    assert_all_close(leaves.gradients(), expected)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"activation_clamp": 0.5}, {"clamp": 0.5}),
        ({"activation": "swiglu_oai"}, {"alpha": 1.702, "up_offset": 1.0, "clamp": 7.0}),
        ({"activation": "swiglu_oai", "activation_alpha": 1.3, "activation_clamp": 1.0}, {"alpha": 1.3, "up_offset": 1.0, "clamp": 1.0}),
    ],
)
def test_activation_options(options, values):
    inputs, buffer = make_inputs(bias=True), make_buffer()
    dy = torch.randn(T, H, dtype=torch.float64)
    y, expected = truth(inputs, dy, **values)
    leaves = inputs.trainable()
    actual = deep_gemm.mega_moe(*leaves.args, buffer, **leaves.biases, **options)
    actual.backward(dy)
    torch.testing.assert_close(actual.detach(), y)
    assert_all_close(leaves.gradients(), expected)
    assert not torch.allclose(y, plain_moe(inputs))


@pytest.mark.parametrize("topk", [1, 2, 6, 16])
@pytest.mark.parametrize("idx_dtype", [torch.int32, torch.int64])
def test_topk(topk, idx_dtype, monkeypatch):
    experts = 16  # K = 16 needs as many
    monkeypatch.setattr("api_inputs.E", experts)
    inputs, buffer = make_inputs(topk=topk), deep_gemm.get_symm_buffer_for_mega_moe(None, experts, T, topk, H, I, device="cpu")
    inputs.topk_idx = inputs.topk_idx.to(idx_dtype)
    y, _ = deep_gemm.mega_moe_fwd(*inputs.args, buffer)
    inputs.topk_idx = inputs.topk_idx.long()
    torch.testing.assert_close(y, plain_moe(inputs))


def test_no_tokens_gives_zero_weight_gradients():
    inputs, buffer = make_inputs(tokens=0).trainable(), make_buffer()
    y = deep_gemm.mega_moe(*inputs.args, buffer)
    assert y.shape == (0, H)
    y.sum().backward()
    assert not inputs.w13.grad.any() and not inputs.w2.grad.any() and inputs.x.grad.shape == (0, H)


def test_all_slots_empty_gives_zeros():
    inputs, buffer = make_inputs(), make_buffer()
    inputs.topk_idx.fill_(-1)
    y, state = deep_gemm.mega_moe_fwd(*inputs.args, buffer)
    gradients = by_name(deep_gemm.mega_moe_bwd(torch.ones_like(y), state))
    assert not y.any() and len(gradients) == 4 and not any(value.any() for value in gradients.values())


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_bf16_within_its_rounding(weights_dtype):
    inputs, buffer = make_inputs(dtype=torch.bfloat16), make_buffer()
    inputs.topk_weights = inputs.topk_weights.to(weights_dtype)
    exact = make_inputs(dtype=torch.bfloat16)
    exact.x, exact.w13, exact.w2, exact.topk_weights = (t.double() for t in (inputs.x, inputs.w13, inputs.w2, inputs.topk_weights))
    dy = torch.randn(T, H).bfloat16()
    y, expected = truth(exact, dy.double())
    leaves = inputs.trainable()
    actual = deep_gemm.mega_moe(*leaves.args, buffer)
    actual.backward(dy)
    for got, want, like in [(actual, y, inputs.x)] + [(leaves.gradients()[name], expected[name], getattr(inputs, name)) for name in NAMES[:4]]:
        assert got.dtype == like.dtype
        assert (got.double() - want).norm() <= 4e-3 * want.norm()  # one BF16 rounding of the result is 2^-9 a value at most


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "fp8_bwd"])
def test_precision_of_buffer_or_call(precision):
    inputs = make_inputs(dtype=torch.bfloat16)
    made_for, plain = make_buffer(precision=precision), make_buffer()
    y, _ = deep_gemm.mega_moe_fwd(*inputs.args, made_for)
    same, _ = deep_gemm.mega_moe_fwd(*inputs.args, plain, precision=precision)
    bf16, _ = deep_gemm.mega_moe_fwd(*inputs.args, plain)
    assert torch.equal(y, same)
    assert torch.equal(y, bf16) == (precision == "fp8_bwd")


@pytest.mark.parametrize("needs", [("x",), ("topk_weights",), ("w13",), ("w2",), ("b13", "b2"), ("x", "w2"), ()])
def test_needs_selects_gradients(needs):
    inputs, buffer = make_inputs(bias=True), make_buffer()
    y, state = deep_gemm.mega_moe_fwd(*inputs.args, buffer, **inputs.biases)
    dy = torch.randn_like(y)
    everything = by_name(deep_gemm.mega_moe_bwd(dy, state, wgrad_dtype=torch.float64))
    some = by_name(deep_gemm.mega_moe_bwd(dy, state, wgrad_dtype=torch.float64, needs=needs))
    assert some.keys() == set(needs)
    assert_all_close(some, {name: everything[name] for name in needs}, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [("x",), ("w13",), ("w2",), ("x", "topk_weights"), ("w13", "w2", "b13", "b2")])
def test_frozen_inputs_ask_for_no_gradient(frozen, monkeypatch):
    buffer = make_buffer()
    leaves = make_inputs(bias=True).trainable(tuple(name for name in NAMES if name not in frozen))
    asked = []
    backend = buffer.backend("reference")
    run = backend.backward
    monkeypatch.setattr(backend, "backward", lambda problem, dy, z, needs, grads: asked.append(needs) or run(problem, dy, z, needs, grads))
    deep_gemm.mega_moe(*leaves.args, buffer, **leaves.biases).sum().backward()
    assert asked == [frozenset(NAMES) - frozenset(frozen)]
    assert {name for name, gradient in leaves.gradients().items() if gradient is not None} == set(NAMES) - set(frozen)


def test_one_frozen_tensor_of_a_pair_gets_no_gradient():
    inputs, buffer = make_inputs(pair=True).trainable(), make_buffer()
    inputs.w13[0].requires_grad_(False)
    deep_gemm.mega_moe(*inputs.args, buffer).sum().backward()
    assert inputs.w13[0].grad is None and inputs.w13[1].grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pair", [False, True])
def test_weight_gradients_written_or_added_into_given_tensors(dtype, pair):
    inputs, buffer = make_inputs(pair=pair, bias=True, dtype=torch.float32), make_buffer()
    y, state = deep_gemm.mega_moe_fwd(*inputs.args, buffer, **inputs.biases)
    dy = torch.randn_like(y)
    fresh = deep_gemm.mega_moe_bwd(dy, state, wgrad_dtype=dtype)
    assert fresh.dw2.dtype == dtype

    def targets(fill):
        of = lambda value: tuple(map(of, value)) if isinstance(value, tuple) else torch.full_like(value, fill)
        return {"dw13": of(fresh.dw13), "dw2": of(fresh.dw2), "db13": of(fresh.db13), "db2": of(fresh.db2)}

    given = targets(float("nan"))
    written = deep_gemm.mega_moe_bwd(dy, state, **given)
    assert written.dw2 is given["dw2"] and written.db2 is given["db2"]
    assert_all_close(by_name(written), by_name(fresh), rtol=0, atol=0)
    given = targets(1.0)
    added = by_name(deep_gemm.mega_moe_bwd(dy, state, **given, accumulate=True))
    exact = by_name(deep_gemm.mega_moe_bwd(dy, state, wgrad_dtype=torch.float32))
    for name in ("w13", "w2", "b13", "b2"):
        torch.testing.assert_close(added[name], (exact[name] + 1).to(dtype))


def test_main_grads_accumulate_over_micro_batches():
    batches = [make_inputs(dtype=torch.bfloat16, seed=seed) for seed in (0, 1)]
    weights = batches[0].trainable()
    buffer, buffers_grads = make_buffer(), {}
    main_grads = {"w13": torch.zeros(E, 2 * I, H), "w2": torch.zeros(E, H, I)}
    sums = {"w13": 0, "w2": 0}
    outputs = []
    for batch in batches:  # both forwards before any backward, as a pipeline schedule does
        batch.w13, batch.w2 = weights.w13, weights.w2
        batch.x.requires_grad_()
        outputs.append(deep_gemm.mega_moe(*batch.args, buffer, main_grads=main_grads))
        y, state = deep_gemm.mega_moe_fwd(*batch.args, buffer)
        gradients = deep_gemm.mega_moe_bwd(torch.ones_like(y), state)
        buffers_grads[id(batch)] = gradients.dx
        sums = {"w13": sums["w13"] + gradients.dw13, "w2": sums["w2"] + gradients.dw2}
    for y in reversed(outputs):
        y.sum().backward()
    assert weights.w13.grad is None and weights.w2.grad is None
    assert all(torch.equal(batch.x.grad, buffers_grads[id(batch)]) for batch in batches)
    for name, total in sums.items():
        torch.testing.assert_close(main_grads[name], total)


def test_main_grads_with_pair_and_biases_and_a_frozen_weight():
    inputs, buffer = make_inputs(pair=True, bias=True, dtype=torch.float32), make_buffer()
    leaves = inputs.trainable(("x", "w13", "b13", "b2"))
    main_grads = {
        "w13": tuple(torch.ones(E, I, H) for _ in range(2)),
        "w2": torch.ones(E, H, I),
        "b13": tuple(torch.ones(E, I) for _ in range(2)),
        "b2": torch.ones(E, H),
    }
    y = deep_gemm.mega_moe(*leaves.args, buffer, **leaves.biases, main_grads=main_grads)
    dy = torch.randn_like(y)
    y.backward(dy)
    _, state = deep_gemm.mega_moe_fwd(*inputs.args, buffer, **inputs.biases)
    expected = by_name(deep_gemm.mega_moe_bwd(dy, state))
    assert (main_grads["w2"] == 1).all()
    for name in ("w13", "b13"):
        torch.testing.assert_close(torch.cat(main_grads[name], 1), expected[name] + 1)
    torch.testing.assert_close(main_grads["b2"], expected["b2"] + 1)
    torch.testing.assert_close(leaves.x.grad, expected["x"])


def test_state_is_plain_and_says_what_it_owns():
    inputs, buffer = make_inputs(dtype=torch.float32), make_buffer()
    y, recompute = deep_gemm.mega_moe_fwd(*inputs.args, buffer)
    _, preact = deep_gemm.mega_moe_fwd(*inputs.args, buffer, save="preact")
    assert recompute.nbytes == 0 and preact.nbytes == T * K * 2 * I * 4
    dy = torch.randn_like(y)
    first, again = (by_name(deep_gemm.mega_moe_bwd(dy, preact)) for _ in range(2))
    assert_all_close(first, again, rtol=0, atol=0)
    deep_gemm.mega_moe_bwd(dy, preact, retain=False)
    assert preact.nbytes == 0
    with pytest.raises(RuntimeError, match="state: it was freed"):
        deep_gemm.mega_moe_bwd(dy, preact)
    inputs.x.add_(1)
    with pytest.raises(RuntimeError, match="x was modified in place between mega_moe_fwd and mega_moe_bwd"):
        deep_gemm.mega_moe_bwd(dy, recompute)


def test_state_holds_no_graph():
    inputs, buffer = make_inputs(dtype=torch.bfloat16), make_buffer()
    weights = inputs.topk_weights.bfloat16().requires_grad_()
    _, state = deep_gemm.mega_moe_fwd(inputs.x, inputs.topk_idx, weights * 2, inputs.w13, inputs.w2, buffer)
    assert state.problem.topk_weights.dtype == torch.float32 and state.problem.topk_weights.grad_fn is None


@pytest.mark.parametrize("save", ["recompute", "preact"])
def test_nothing_is_saved_when_no_input_needs_a_gradient(save, monkeypatch):
    inputs, buffer = make_inputs(), make_buffer()
    asked = []
    backend = buffer.backend("reference")
    run = backend.gemm1
    monkeypatch.setattr(backend, "gemm1", lambda problem: asked.append(problem.save) or run(problem))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = deep_gemm.mega_moe(*inputs.args, buffer, save=save)
        with torch.no_grad():
            deep_gemm.mega_moe(*inputs.trainable().args, buffer, save=save)
        assert not packed and asked == ["recompute"] * 2 and y.grad_fn is None
        deep_gemm.mega_moe(*inputs.trainable(("topk_weights",)).args, buffer, save=save)
        assert packed and asked[-1] == save


def test_works_in_inference_mode():
    inputs, buffer = make_inputs(), make_buffer()
    with torch.inference_mode():
        y = deep_gemm.mega_moe(inputs.x.clone(), *inputs.args[1:], buffer)
        again, state = deep_gemm.mega_moe_fwd(inputs.x.clone(), *inputs.args[1:], buffer)
        dx = deep_gemm.mega_moe_bwd(torch.ones_like(again), state).dx
    assert torch.equal(y, again) and dx.shape == y.shape


def test_interleaved_calls_on_one_buffer_keep_their_own_results():
    first, second, buffer = make_inputs(seed=0), make_inputs(seed=1), make_buffer()
    alone = []
    for inputs in (first, second):
        leaves = inputs.trainable()
        deep_gemm.mega_moe(*leaves.args, buffer).square().sum().backward()
        alone.append(leaves.gradients())
    one, two = first.trainable(), second.trainable()
    y1, y2 = deep_gemm.mega_moe(*one.args, buffer), deep_gemm.mega_moe(*two.args, buffer)
    y2.square().sum().backward()
    y1.square().sum().backward()
    for leaves, expected in zip((one, two), alone):
        assert_all_close(leaves.gradients(), expected, rtol=0, atol=0)


def test_buffer_knows_whose_routing_it_holds():
    buffer = make_buffer()
    mine, other = torch.ones(3), torch.ones(3)
    buffer.mark_published(mine)
    assert buffer.is_published(mine) and not buffer.is_published(other) and buffer.generation == 1
    buffer.mark_published(None)
    assert not buffer.is_published(mine) and buffer.generation == 2


def test_buffer_life():
    buffer = make_buffer()
    assert copy.deepcopy(buffer) is buffer and buffer.nbytes == 0 and buffer.num_local_experts == E
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(buffer)
    with pytest.raises(AttributeError):
        buffer.hidden = 3
    buffer.check()
    assert buffer.x.shape == (T, H) and (buffer.topk_idx == -1).all() and not buffer.topk_weights.any()
    assert buffer.nbytes == T * (H * 2 + K * 8 + K * 4)
    inputs = make_inputs().trainable()
    y = deep_gemm.mega_moe(*inputs.args, buffer)
    dy, state = deep_gemm.mega_moe_fwd(*inputs.args, buffer)
    buffer.destroy()
    for call in (deep_gemm.mega_moe, deep_gemm.mega_moe_fwd):
        with pytest.raises(RuntimeError, match="buffer.*destroyed"):
            call(*inputs.args, buffer)
    with pytest.raises(RuntimeError, match="destroyed"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="destroyed"):
        deep_gemm.mega_moe_bwd(dy, state)
    for view in ("x", "topk_idx", "topk_weights"):
        with pytest.raises(RuntimeError, match="destroyed"):
            getattr(buffer, view)
    assert buffer.nbytes == 0


def test_graph_keeps_its_buffer_alive():
    inputs = make_inputs().trainable()
    y = deep_gemm.mega_moe(*inputs.args, make_buffer())
    y.sum().backward()
    assert inputs.x.grad is not None


def test_forward_only_names():
    inputs, buffer = make_inputs(dtype=torch.bfloat16), make_buffer(tokens=T + 5)
    buffer.x[:T], buffer.topk_idx[:T], buffer.topk_weights[:T] = inputs.x, inputs.topk_idx, inputs.topk_weights
    l1, l2 = deep_gemm.transform_weights_for_mega_moe(inputs.w13, inputs.w2)
    assert l1 is inputs.w13 and l2 is inputs.w2
    y = torch.full((T, H), float("nan"), dtype=torch.bfloat16)
    deep_gemm.bf16_mega_moe(y, l1, l2, buffer, activation_clamp=1.0)
    expected, _ = deep_gemm.mega_moe_fwd(*inputs.args, buffer, activation_clamp=1.0)
    assert torch.equal(y, expected)
    with pytest.raises(NotImplementedError, match="fp8_mega_moe: there are no kernels yet"):
        deep_gemm.fp8_mega_moe(y, (l1, l1), (l2, l2), buffer)
    with pytest.raises(NotImplementedError, match="cumulative_local_expert_recv_stats"):
        deep_gemm.bf16_mega_moe(y, l1, l2, buffer, torch.zeros(E, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"y.shape = \(40, 10\)"):
        deep_gemm.bf16_mega_moe(torch.zeros(40, H, dtype=torch.bfloat16), l1, l2, buffer)
    for bad, message in ((None, "y = NoneType: expected a torch.Tensor"), (y.float(), "y.dtype = torch.float32: expected torch.bfloat16")):
        with pytest.raises(TypeError, match=message):
            deep_gemm.bf16_mega_moe(bad, l1, l2, buffer)


def test_forced_cuda_without_a_gpu_is_one_clear_sentence():
    inputs, buffer = make_inputs(), make_buffer()
    for call in (deep_gemm.mega_moe_fwd, deep_gemm.mega_moe):
        with pytest.raises(BackendUnavailable, match="backend 'cuda' is unavailable: the tensors are on cpu"):
            call(*make_inputs(dtype=torch.bfloat16).args, buffer, backend="cuda")
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable, match="backend 'cuda' is unavailable: .*(built without CUDA|no usable NVIDIA GPU|driver is too old)"):
            deep_gemm.get_symm_buffer_for_mega_moe(None, 8, T, K, 128, 128, device="cuda")
    deep_gemm.mega_moe_fwd(*inputs.args, buffer)  # the next good call works


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_number_of_sms_without_a_gpu_is_one_clear_sentence():
    with pytest.raises(deep_gemm.BackendUnavailable, match="get_num_sms: no CUDA device: torch says: "):
        deep_gemm.get_num_sms()


def test_import_is_lazy_and_lists_its_names():
    code = (
        "import sys, deep_gemm; assert 'torch' not in sys.modules; "
        "sys.modules.update({'cuda': None, 'deep_gemm._C': None}); "  # as if neither were installed: importing them raises
        "assert set(deep_gemm.__all__) <= set(dir(deep_gemm)) and 'nn' in dir(deep_gemm); deep_gemm.mega_moe; deep_gemm.nn.MegaMoE; "
        "deep_gemm.get_symm_buffer_for_mega_moe(None, 2, 2, 1, 2, 2, device='cpu'); print(deep_gemm.mega_moe_fwd.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=deep_gemm.__path__[0] + "/..")
    assert result.returncode == 0 and result.stdout.strip() == "mega_moe_fwd", result.stderr
    assert all(getattr(deep_gemm, name) is not None for name in deep_gemm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'mega_mo'"):
        _ = deep_gemm.mega_mo
