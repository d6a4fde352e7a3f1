"""The oracle against a loop over (token, slot) under torch autograd in FP64, gradcheck, and cases with a known answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm import reference
from deep_gemm.activation import SwiGLU, resolve_activation

F64 = torch.float64
ACTIVATIONS = {
    "swiglu": resolve_activation("swiglu"),
    "swiglu_clamped": resolve_activation("swiglu", clamp=0.5),
    "swiglu_oai": resolve_activation("swiglu_oai", clamp=0.75),
}


@dataclass
class Inputs:
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None
    b2: torch.Tensor | None
    dy: torch.Tensor

    def leaves(self) -> dict[str, torch.Tensor]:
        named = {"x": self.x, "topk_weights": self.topk_weights, "w13": self.w13, "w2": self.w2, "b13": self.b13, "b2": self.b2}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def make_inputs(T=5, H=6, I=4, E=3, K=2, *, bias=True, seed=0, dtype=F64) -> Inputs:
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g, dtype=F64).to(dtype)

    return Inputs(
        x=randn(T, H),
        topk_idx=torch.randint(-1, E, (T, K), generator=g),
        topk_weights=torch.rand(T, K, generator=g, dtype=F64).to(dtype),
        w13=randn(E, 2 * I, H) / math.sqrt(H),
        w2=randn(E, H, I) / math.sqrt(I),
        b13=randn(E, 2 * I) if bias else None,
        b2=randn(E, H) if bias else None,
        dy=randn(T, H),
    )


def naive_forward(n: Inputs, act: SwiGLU) -> torch.Tensor:
    """One (token, slot) at a time, differentiable."""
    rows = []
    for t in range(n.x.shape[0]):
        row = torch.zeros_like(n.x[t])
        for k, e in enumerate(n.topk_idx[t].tolist()):
            if e < 0:
                continue
            z = n.w13[e] @ n.x[t] + (0 if n.b13 is None else n.b13[e])
            gate, up = z.chunk(2)
            gate, up = torch.clamp(gate, max=act.clamp), torch.clamp(up, -act.clamp, act.clamp)
            a = gate / (1 + torch.exp(-act.alpha * gate)) * (up + act.up_offset)
            row = row + n.topk_weights[t, k] * (n.w2[e] @ a + (0 if n.b2 is None else n.b2[e]))
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros_like(n.x)


def naive_gradients(n: Inputs, act: SwiGLU) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in n.leaves().items()}
    y = naive_forward(Inputs(**{**vars(n), **leaves}), act)
    if not y.requires_grad:
        return y, {name: torch.zeros_like(tensor) for name, tensor in leaves.items()}
    grads = torch.autograd.grad(y, list(leaves.values()), n.dy, materialize_grads=True)
    return y.detach(), dict(zip(leaves, grads))


def oracle(n: Inputs, act: SwiGLU = SwiGLU(), *, pair=False, **options):  # noqa: B008
    w13 = tuple(n.w13.chunk(2, 1)) if pair else n.w13
    b13 = tuple(n.b13.chunk(2, 1)) if pair and n.b13 is not None else n.b13
    options = {"b13": b13, "b2": n.b2, "activation": act, **options}
    y = reference.forward(n.x, n.topk_idx, n.topk_weights, w13, n.w2, **options)
    grads = reference.backward(n.dy, n.x, n.topk_idx, n.topk_weights, w13, n.w2, **options)
    if pair:
        grads |= {name: torch.cat(grads[name], 1) for name in ("w13", "b13") if name in grads}
    return y, grads


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-11) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_forward_and_all_gradients_equal_autograd(data):
    draw = data.draw
    n = make_inputs(
        T=draw(st.integers(0, 9)),
        H=draw(st.integers(1, 9)),
        I=draw(st.integers(1, 7)),
        E=draw(st.integers(1, 6)),
        K=draw(st.integers(1, 16)),
        bias=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )
    act = ACTIVATIONS[draw(st.sampled_from(sorted(ACTIVATIONS)))]
    y, grads = oracle(n, act, pair=draw(st.booleans()))
    expected_y, expected = naive_gradients(n, act)
    assert_same({"y": y, **grads}, {"y": expected_y, **expected})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_of_a_function_made_of_forward_and_backward(activation):
    act = ACTIVATIONS[activation]
    n = make_inputs(T=4, H=3, I=2, E=3, K=2, seed=3)

    class Moe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, p, w13, w2, b13, b2):
            ctx.save_for_backward(x, p, w13, w2, b13, b2)
            return reference.forward(x, n.topk_idx, p, w13, w2, b13=b13, b2=b2, activation=act)

        @staticmethod
        def backward(ctx, dy):
            x, p, w13, w2, b13, b2 = ctx.saved_tensors
            grads = reference.backward(dy, x, n.topk_idx, p, w13, w2, b13=b13, b2=b2, activation=act)
            return tuple(grads[name] for name in ("x", "topk_weights", "w13", "w2", "b13", "b2"))

    assert torch.autograd.gradcheck(Moe.apply, [leaf.clone().requires_grad_() for leaf in n.leaves().values()])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_swiglu_derivative_equals_autograd_on_and_around_the_clamp(activation):
    act = ACTIVATIONS[activation]
    bound = min(act.clamp, 3.0)
    points = torch.tensor([-40, -bound - 0.1, -bound, -0.3, 0, 0.3, bound, bound + 0.1, 40], dtype=F64)
    gate, up = (part.reshape(-1).clone().requires_grad_() for part in torch.meshgrid(points, points, indexing="ij"))
    da = torch.linspace(-1, 1, gate.numel(), dtype=F64)
    expected = torch.autograd.grad(reference.swiglu(gate, up, act), (gate, up), da)
    actual = reference.dswiglu(gate.detach(), up.detach(), da, act)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_swiglu_known_values():
    gate, up = torch.tensor([0.0, 1.0, 9.0], dtype=F64), torch.tensor([3.0, 2.0, -9.0], dtype=F64)
    plain = reference.swiglu(gate, up, ACTIVATIONS["swiglu"])
    assert plain.tolist() == pytest.approx([0.0, 2 / (1 + math.exp(-1)), -81 / (1 + math.exp(-9))])
    oai = reference.swiglu(gate, up, resolve_activation("swiglu_oai"))
    assert oai.tolist() == pytest.approx([0.0, 3 / (1 + math.exp(-1.702)), 7 * -6 / (1 + math.exp(-1.702 * 7))])


def test_nan_preactivation_is_not_hidden_by_the_clamp():
    nan = torch.tensor([math.nan])
    dgate, dup = reference.dswiglu(nan, nan, torch.ones(1), ACTIVATIONS["swiglu_clamped"])
    assert dgate.isnan().all() and dup.isnan().all()


def test_pair_and_fused_weights_give_the_same_bits():
    n = make_inputs(T=20, H=40, I=24, dtype=torch.float32)
    for precision in reference.PRECISIONS:
        (y, grads), (pair_y, pair_grads) = (oracle(n, pair=pair, precision=precision) for pair in (False, True))
        assert torch.equal(y, pair_y) and all(torch.equal(grads[name], pair_grads[name]) for name in grads)


def test_every_entry_without_expert_gives_zeros_even_with_nan_weights():
    n = make_inputs()
    n.topk_idx.fill_(-1)
    n.topk_weights.fill_(math.nan)
    y, grads = oracle(n)
    assert (y == 0).all() and all((grad == 0).all() for grad in grads.values())


def test_slot_without_expert_has_zero_dp_and_contributes_nothing():
    n = make_inputs(T=6, K=3)
    n.topk_idx[:, 0], n.topk_idx[:, 1], n.topk_idx[:, 2] = 1, -1, 2
    y, grads = oracle(n)
    assert (grads["topk_weights"][:, 1] == 0).all() and (grads["topk_weights"][:, [0, 2]] != 0).all()
    n.topk_idx, n.topk_weights = n.topk_idx[:, [0, 2]], n.topk_weights[:, [0, 2]]
    assert torch.equal(y, oracle(n)[0])


def test_expert_without_rows_gets_zero_gradients():
    n = make_inputs(E=4)
    n.topk_idx.clamp_(max=2)
    _, grads = oracle(n)
    assert all((grads[name][3] == 0).all() for name in ("w13", "w2", "b13", "b2"))


def test_no_tokens():
    n = make_inputs(T=0)
    for precision in reference.PRECISIONS:
        y, grads = oracle(n, precision=precision)
        assert y.shape == (0, 6) and grads["x"].shape == (0, 6) and grads["topk_weights"].shape == (0, 2)
        assert all((grads[name] == 0).all() and grads[name].shape == n.leaves()[name].shape for name in ("w13", "w2", "b13", "b2"))


def test_zero_routing_weights_leave_only_dp():
    n = make_inputs(E=2)
    n.topk_idx.clamp_(min=0)
    n.topk_weights.zero_()
    y, grads = oracle(n)
    assert (y == 0).all() and (grads["topk_weights"] != 0).all()
    assert all((grad == 0).all() for name, grad in grads.items() if name != "topk_weights")


def test_zero_down_projection_leaves_only_dw2():
    n = make_inputs(E=2, bias=False)
    n.topk_idx.clamp_(min=0)
    n.w2.zero_()
    y, grads = oracle(n)
    assert (y == 0).all() and (grads["w2"] != 0).any()
    assert all((grad == 0).all() for name, grad in grads.items() if name != "w2")


def test_zero_tokens_with_biases_give_bias_outputs():
    n = make_inputs(T=3, E=1, K=1)
    n.topk_idx.zero_()
    n.x.zero_()
    gate, up = n.b13[0].chunk(2)
    expected = n.topk_weights * (n.w2[0] @ (torch.nn.functional.silu(gate) * up) + n.b2[0])
    y, grads = oracle(n)
    torch.testing.assert_close(y, expected)
    assert (grads["w13"] == 0).all() and (grads["b13"] != 0).any()


def test_one_expert_one_slot_is_a_dense_layer():
    n = make_inputs(T=7, E=1, K=1, bias=False)
    n.topk_idx.zero_()
    gate, up = (n.x @ n.w13[0].T).chunk(2, 1)
    torch.testing.assert_close(oracle(n)[0], n.topk_weights * ((torch.nn.functional.silu(gate) * up) @ n.w2[0].T))


def test_expert_named_twice_counts_twice():
    n = make_inputs(T=4, K=2)
    n.topk_idx.fill_(1)
    y, grads = oracle(n)
    once = Inputs(**{**vars(n), "topk_idx": n.topk_idx[:, :1], "topk_weights": n.topk_weights.sum(1, keepdim=True)})
    expected_y, expected = oracle(once)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(grads["topk_weights"], expected["topk_weights"].expand(-1, 2))
    assert_same({k: v for k, v in grads.items() if k != "topk_weights"}, {k: v for k, v in expected.items() if k != "topk_weights"})


def test_bf16_inputs_are_computed_in_fp32_or_in_the_dtype_asked_for():
    n = make_inputs(T=6, H=16, I=8, dtype=torch.bfloat16)
    wide = Inputs(**{name: t.double() if t.is_floating_point() else t for name, t in vars(n).items()})
    truth_y, truth = oracle(wide)
    y, grads = oracle(n)
    assert y.dtype == torch.float32
    assert_same({"y": y.double()} | {k: v.double() for k, v in grads.items()}, {"y": truth_y, **truth}, 2e-5)
    exact_y, exact = oracle(n, dtype=F64)
    assert torch.equal(exact_y, truth_y) and all(torch.equal(exact[name], truth[name]) for name in truth)


@pytest.mark.parametrize("bad", [-2, 3])
def test_expert_id_out_of_range_is_named(bad):
    n = make_inputs(T=5, E=3, K=2)
    n.topk_idx[3, 1] = bad
    with pytest.raises(ValueError, match=rf"topk_idx\[3, 1\] = {bad}, but num_experts = 3 \(valid: -1 or 0..2\)"):
        oracle(n)


def test_unknown_precision_is_named():
    with pytest.raises(ValueError, match=r"precision = 'fp4': expected one of \['bf16', 'fp8', 'fp8_bwd', 'mxfp8'\]"):
        oracle(make_inputs(), precision="fp4")
