"""`ReferenceBackend` behind the Backend protocol on one rank: static shapes, rounding, what is needed, where weight gradients go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_reference import make_inputs

from deep_gemm import reference
from deep_gemm.activation import resolve_activation
from deep_gemm.errors import BackendUnavailable
from deep_gemm.mega.backend import GRADIENTS, Problem, WeightGrads
from deep_gemm.reference.backend import ReferenceBackend

ACT = resolve_activation("swiglu_oai", clamp=0.75)
NO_BIAS = frozenset({"x", "topk_weights", "w13", "w2"})


def make_problem(*, dtype=torch.bfloat16, save="preact", pair=False, bias=True, T=11, precision="bf16"):
    n = make_inputs(T=T, H=16, I=12, E=3, K=3, bias=bias, dtype=dtype)
    buffer = SimpleNamespace(num_ranks=1, group=None, mark_published=lambda token: None)
    split = (lambda w: tuple(w.chunk(2, 1))) if pair else (lambda w: (w,))
    weights = n.topk_weights if dtype == torch.float64 else n.topk_weights.float()
    problem = Problem(n.x, n.topk_idx, weights, split(n.w13), n.w2, split(n.b13) if bias else None, n.b2, ACT, precision, save, buffer)
    return problem, n.dy, ReferenceBackend(buffer)


def run(problem, dy, backend, needs=frozenset(GRADIENTS), grads=None):
    a, z = backend.gemm1(problem)
    return backend.gemm2(problem, a), backend.backward(problem, dy, z, needs, grads or WeightGrads())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("pair", [False, True])
def test_equals_the_oracle_rounded_once(dtype, save, pair):
    problem, dy, backend = make_problem(dtype=dtype, save=save, pair=pair)
    y, grads = run(problem, dy, backend)
    given = (problem.w13, problem.w2) if pair else (problem.w13[0], problem.w2)
    options = {"b13": problem.b13 if pair else problem.b13[0], "b2": problem.b2, "activation": ACT}
    routing = (problem.topk_idx, problem.topk_weights)
    assert torch.equal(y, reference.forward(problem.x, *routing, *given, **options).to(dtype))
    expected = reference.backward(dy, problem.x, *routing, *given, **options)
    assert torch.equal(grads.dx, expected["x"].to(dtype)) and grads.dx.dtype == dtype
    assert torch.equal(grads.dtopk_weights, expected["topk_weights"]) and grads.dtopk_weights.dtype == problem.topk_weights.dtype
    for name, parts in (("w13", grads.dw13), ("b13", grads.db13), ("w2", (grads.dw2,)), ("b2", (grads.db2,))):
        wanted = expected[name] if isinstance(expected[name], tuple) else (expected[name],)
        assert len(parts) == len(wanted)
        assert all(part.dtype == torch.float32 and torch.equal(part, want.float()) for part, want in zip(parts, wanted)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("T", [0, 11])
def test_saved_shapes_are_those_promised_and_do_not_depend_on_routing(dtype, save, T):
    problem, _, backend = make_problem(dtype=dtype, save=save, T=T)
    for routing in (problem.topk_idx, torch.full_like(problem.topk_idx, -1), torch.zeros_like(problem.topk_idx)):
        problem.topk_idx.copy_(routing)
        a, z = backend.gemm1(problem)
        assert (tuple(a.shape), tuple(z.shape)) == backend.fake_shapes(problem)
        assert a.dtype == z.dtype == dtype


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_one_gradient_alone_has_the_same_bits(save, name):
    problem, dy, backend = make_problem(save=save)
    field = {"x": "dx", "topk_weights": "dtopk_weights", "w13": "dw13", "w2": "dw2", "b13": "db13", "b2": "db2"}
    everything = run(problem, dy, backend)[1]
    alone = run(problem, dy, backend, frozenset({name}))[1]
    for other, attribute in field.items():
        value = getattr(alone, attribute)
        if other != name:
            assert value is None
            continue
        pairs = zip(value, getattr(everything, attribute)) if isinstance(value, tuple) else [(value, getattr(everything, attribute))]
        assert all(torch.equal(one, both) for one, both in pairs)


def test_no_gradient_needed_gives_none():
    problem, dy, backend = make_problem()
    assert all(value is None for value in vars(run(problem, dy, backend, frozenset())[1]).values())


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("given_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_given_tensors_are_written_or_accumulated_with_one_rounding(pair, given_dtype):
    problem, dy, backend = make_problem(pair=pair)
    fresh = run(problem, dy, backend)[1]

    def targets(value):
        return tuple(torch.full_like(part, value, dtype=given_dtype) for part in fresh.dw13), torch.full_like(
            fresh.dw2, value, dtype=given_dtype
        )

    dw13, dw2 = targets(torch.nan)
    out = run(problem, dy, backend, NO_BIAS, WeightGrads(dw13=dw13, dw2=dw2))[1]
    assert out.dw2 is dw2 and all(one is other for one, other in zip(out.dw13, dw13))
    assert torch.equal(dw2, fresh.dw2.to(given_dtype))
    dw13, dw2 = targets(3.0)
    run(problem, dy, backend, NO_BIAS, WeightGrads(dw13=dw13, dw2=dw2, accumulate=True))
    wide = torch.promote_types(given_dtype, torch.float32)
    for given, grad in zip((*dw13, dw2), (*fresh.dw13, fresh.dw2)):
        assert torch.equal(given, (grad.to(wide) + 3).to(given_dtype))


def test_allocated_weight_gradients_have_the_wanted_dtype():
    problem, dy, backend = make_problem()
    out = run(problem, dy, backend, grads=WeightGrads(dtype=torch.bfloat16))[1]
    assert {t.dtype for t in (*out.dw13, out.dw2, *out.db13, out.db2)} == {torch.bfloat16}


def test_inputs_that_require_grad_are_not_tracked():
    problem, dy, backend = make_problem()
    problem.x.requires_grad_()
    problem.w2.requires_grad_()
    y, grads = run(problem, dy, backend)
    assert not y.requires_grad and not grads.dw2.requires_grad


def test_many_ranks_without_torch_distributed_are_refused_in_one_sentence():
    with pytest.raises(BackendUnavailable, match="this buffer is a SimpleNamespace of 2 ranks without a ProcessGroup"):
        ReferenceBackend(SimpleNamespace(num_ranks=2, group=SimpleNamespace()))
