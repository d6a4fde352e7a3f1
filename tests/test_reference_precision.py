"""Quantised emulations: every GEMM's operands against a second emulation made of loops over blocks, and what quantising must not do."""

from __future__ import annotations

import pytest
import torch
from test_quant import cast_by_loop
from test_reference import F64, Inputs, make_inputs, oracle

# Per precision: blocks of forward rows, dgrad rows, weights as stored [out, in], the same weights in a dgrad, and tokens of a wgrad.
FP8, MX = False, True
TABLE = {
    "fp8": (FP8, (1, 128), (1, 128), (128, 128), (128, 128), (128, 1)),
    "mxfp8": (MX, (1, 32), (1, 32), (1, 32), (32, 1), (32, 1)),
    "fp8_bwd": (FP8, None, (1, 128), None, (128, 128), None),
}


def second_emulation(n: Inputs, precision: str) -> dict[str, torch.Tensor]:
    """swiglu without biases or clamp, expert by expert in FP64; dense one-hot bookkeeping instead of sorting."""
    power_of_two, forward_rows, dgrad_rows, forward_weight, dgrad_weight, tokens = TABLE[precision]

    def q(value, block):
        return value if block is None else cast_by_loop(value, block, power_of_two)

    out = {name: torch.zeros_like(tensor) for name, tensor in n.leaves().items()}
    out["y"] = torch.zeros_like(n.x)
    half = n.w2.shape[2]
    for e in range(n.w2.shape[0]):
        t, k = (n.topk_idx == e).nonzero(as_tuple=True)
        x, dy, p = n.x[t], n.dy[t], n.topk_weights[t, k][:, None]
        w1, w3, w2 = n.w13[e, :half], n.w13[e, half:], n.w2[e]
        gate, up = (q(x, forward_rows) @ q(w, forward_weight).T for w in (w1, w3))
        s = torch.sigmoid(gate)
        a = gate * s * up
        out["y"].index_add_(0, t, p * (q(a, forward_rows) @ q(w2, forward_weight).T))
        da = q(dy, dgrad_rows) @ q(w2, dgrad_weight)
        out["topk_weights"][t, k] = (da * a).sum(1)
        dgate, dup = p * da * up * (s + gate * s * (1 - s)), p * da * gate * s
        out["x"].index_add_(0, t, q(dgate, dgrad_rows) @ q(w1, dgrad_weight) + q(dup, dgrad_rows) @ q(w3, dgrad_weight))
        out["w13"][e] = torch.cat([q(d, tokens).T @ q(x, tokens) for d in (dgate, dup)])
        out["w2"][e] = q(dy, tokens).T @ q(p * a, tokens)
    return out


@pytest.mark.parametrize("precision", TABLE)
def test_operands_are_quantised_as_the_table_says(precision):
    # About 150 rows per expert, H and I: every block has a full one and a tail.
    n = make_inputs(T=170, H=160, I=140, E=2, K=2, bias=False, seed=5)
    # Many magnitudes in every block: with scales that are powers of two, the block shows only where small elements become subnormal.
    generator = torch.Generator().manual_seed(8)
    for operand in (n.x, n.dy, n.w13, n.w2):
        operand *= torch.exp2(torch.randint(-16, 1, operand.shape, generator=generator))
    y, grads = oracle(n, precision=precision)
    expected = second_emulation(n, precision)
    for name, value in {"y": y, **grads}.items():
        error = (value - expected[name]).norm() / expected[name].norm()
        assert error < 1e-9, f"{name}: {error:.1e}"


# Tensors whose GEMMs a precision leaves alone.
UNTOUCHED = {"bf16": {"y", "x", "topk_weights", "w13", "w2"}, "fp8_bwd": {"y", "w2"}, "fp8": set(), "mxfp8": set()}


@pytest.mark.parametrize("precision", UNTOUCHED)
def test_error_is_that_of_fp8_where_quantised_and_none_elsewhere(precision):
    n = make_inputs(T=256, H=256, I=128, E=4, K=2, bias=False, seed=6)
    exact, quantised = ({"y": y, **grads} for y, grads in (oracle(n), oracle(n, precision=precision)))
    for name, value in exact.items():
        error = ((quantised[name] - value).norm() / value.norm()).item()
        # One operand in E4M3 has a relative error of about 2.6 %; a product of a few of them stays under 10 %.
        assert error == 0 if name in UNTOUCHED[precision] else 0.01 < error < 0.1, f"{name}: {error}"


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "fp8_bwd"])
@pytest.mark.parametrize("exponent", [-27, -60])  # dy of about 1e-8 and 1e-18
def test_small_gradients_survive(precision, exponent):
    """Gradients are linear in dy; a power of two changes no mantissa, so they scale without a single different bit."""
    n = make_inputs(T=40, H=64, I=32, dtype=torch.float32, seed=7)
    _, grads = oracle(n, precision=precision)
    n.dy = n.dy * 2.0**exponent
    _, small = oracle(n, precision=precision)
    for name, grad in grads.items():
        assert grad.abs().max() > 0 and torch.equal(small[name], grad * 2.0**exponent), name


def test_wgrad_blocks_start_at_each_experts_first_row():
    """Rows of one expert do not share a scale with those of another: huge rows there change nothing here."""
    n = make_inputs(T=100, H=32, I=16, E=2, K=1, bias=False, dtype=F64)
    n.topk_idx[:, 0] = (torch.arange(100) >= 30).long()
    _, grads = oracle(n, precision="fp8")
    n.x[:30] *= 1000
    _, scaled = oracle(n, precision="fp8")
    assert torch.equal(grads["w13"][1], scaled["w13"][1]) and not torch.equal(grads["w13"][0], scaled["w13"][0])
