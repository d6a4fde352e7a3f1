"""The registered operators: `mega_moe = B(A(...))`, see docs/design.md.

    deep_gemm::mega_moe_gemm1, ..._main_grad     A: through GEMM 1; saves everything; its backward makes all gradients
    deep_gemm::mega_moe_gemm2                    B: GEMM 2 and combine; saves nothing; its backward hands dy to A's `proxy`
    deep_gemm::mega_moe_backward, ..._main_grad  what A's backward calls; the main_grad form adds into given tensors

`library.define` / `impl` and few arguments, because this is the path of every layer: the decorators cost 8 us a call, and
register_autograd's own bookkeeping grows with the square of the number of arguments (57 us for 11, 89 us for 16; torch 2.13). So options
travel as one string and the buffer as the integer `handle`. w13/w3 (b13/b3) are one stacked tensor and None, or the pair (gate, up).
"""

from __future__ import annotations

import torch
from torch import Tensor

from deep_gemm.mega import checks
from deep_gemm.mega.backend import Backend, Gradients, Problem, WeightGrads, on_device
from deep_gemm.mega.buffer import buffer_of

_CALL = (
    "Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w13, Tensor? w3, Tensor w2, Tensor? b13, Tensor? b3, Tensor? b2, int handle, str options"
)
_NUM_TENSORS, _NUM_CALL = 9, 11  # arguments in _CALL: tensors, all
_TARGETS = "Tensor? dw13, Tensor? dw3, Tensor? dw2, Tensor? db13, Tensor? db3, Tensor? db2"
_MUTATED_TARGETS = _TARGETS.replace("Tensor?", "Tensor({}!)?").format(*"abcdef")
# Which argument of _CALL (w13 and b13: either of two) asks for which gradient.
_NEEDED_BY = {"x": (0,), "topk_weights": (2,), "w13": (3, 4), "w2": (5,), "b13": (6, 7), "b2": (8,)}

library = torch.library.Library("deep_gemm", "DEF")
library.define(f"mega_moe_gemm1({_CALL}) -> (Tensor proxy, Tensor a, Tensor z)")
library.define(f"mega_moe_gemm1_main_grad({_CALL}, {_TARGETS}) -> (Tensor proxy, Tensor a, Tensor z)")
library.define(f"mega_moe_gemm2(Tensor proxy, Tensor a, {_CALL}) -> Tensor y")
library.define(f"mega_moe_backward(Tensor dy, Tensor z, {_CALL}, str needs) -> Tensor[] gradients")
library.define(f"mega_moe_backward_main_grad(Tensor dy, Tensor z, {_CALL}, str needs, {_MUTATED_TARGETS}) -> (Tensor dx, Tensor dtopk_weights)")

gemm1 = torch.ops.deep_gemm.mega_moe_gemm1.default
gemm1_main_grad = torch.ops.deep_gemm.mega_moe_gemm1_main_grad.default
gemm2 = torch.ops.deep_gemm.mega_moe_gemm2.default
backward = torch.ops.deep_gemm.mega_moe_backward.default
backward_main_grad = torch.ops.deep_gemm.mega_moe_backward_main_grad.default


def _pair(first: Tensor | None, second: Tensor | None) -> tuple[Tensor, ...] | None:
    if first is None:
        return None
    return (first,) if second is None else (first, second)


def _resolve(call: tuple, check: str) -> tuple[Problem, Backend]:
    """The arguments of _CALL as a problem, and the backend that is to solve it."""
    x, topk_idx, topk_weights, w13, w3, w2, b13, b3, b2, handle, text = call
    buffer, options = buffer_of(handle), checks.decode_options(text)
    problem = checks.make_problem(x, topk_idx, topk_weights, _pair(w13, w3), w2, _pair(b13, b3), b2, buffer, options, check=check)
    return problem, buffer.backend(options.backend)


def _given(targets: tuple[Tensor | None, ...]) -> dict[str, Tensor | tuple[Tensor, ...] | None]:
    dw13, dw3, dw2, db13, db3, db2 = targets
    return {"w13": _pair(dw13, dw3), "w2": dw2, "b13": _pair(db13, db3), "b2": db2}


def _main_grads(problem: Problem, targets: tuple[Tensor | None, ...], needs: frozenset[str] | None = None) -> WeightGrads:
    given = {name: value for name, value in _given(targets).items() if value is not None and (needs is None or name in needs)}
    return checks.weight_grads(given, problem, frozenset(given), accumulate=True, dtype=torch.float32, label="main_grads[{!r}]")


def _proxy(x: Tensor) -> Tensor:
    return x.new_zeros(()).expand(x.shape)


def _gemm1_impl(*args):
    problem, backend = _resolve(args[:_NUM_CALL], "all")
    if len(args) > _NUM_CALL:
        _main_grads(problem, args[_NUM_CALL:])
    backend.check()
    return (_proxy(problem.x), *backend.gemm1(problem))


def _gemm1_fake(*args):
    problem, backend = _resolve(args[:_NUM_CALL], "shapes")
    if len(args) > _NUM_CALL:
        _main_grads(problem, args[_NUM_CALL:])
    a, z = backend.fake_shapes(problem)
    return _proxy(problem.x), problem.x.new_empty(a), problem.x.new_empty(z)


def _gemm2_impl(proxy, a, *call):
    problem, backend = _resolve(call, "none")
    return backend.gemm2(problem, a)


def _gemm2_fake(proxy, a, *call):
    return torch.empty_like(call[0])


def _flat(gradients: Gradients, topk_weights: Tensor) -> list[Tensor]:
    """The gradients that were made, in the order of `GRADIENTS`, pairs as two."""
    dp = gradients.dtopk_weights
    flat = [gradients.dx, None if dp is None else dp.to(topk_weights.dtype), *(gradients.dw13 or ()), gradients.dw2]
    flat += [*(gradients.db13 or ()), gradients.db2]
    return [gradient for gradient in flat if gradient is not None]


def _aligned(dy: Tensor) -> Tensor:
    """What autograd hands over may be a slice of a larger gradient, at any element of it."""
    return dy if checks.is_aligned(dy) else dy.clone()


def _backward_impl(dy, z, *args):
    problem, backend = _resolve(args[:_NUM_CALL], "none")
    backend.check()
    grads = WeightGrads(dtype=problem.w2.dtype)
    return _flat(backend.backward(problem, _aligned(dy), z, frozenset(args[_NUM_CALL].split()), grads), args[2])


def _backward_fake(dy, z, *args):
    needs = args[_NUM_CALL].split()
    needed = [args[position] for name, positions in _NEEDED_BY.items() if name in needs for position in positions]
    return [torch.empty_like(tensor) for tensor in needed if tensor is not None]


def _backward_main_grad_impl(dy, z, *args):
    """(dx, dtopk_weights), empty where not needed: an operator that mutates can be functionalised only if it returns plain tensors."""
    problem, backend = _resolve(args[:_NUM_CALL], "none")
    backend.check()
    needs = frozenset(args[_NUM_CALL].split())
    made = backend.backward(problem, _aligned(dy), z, needs, _main_grads(problem, args[_NUM_CALL + 1 :], needs))
    x, topk_weights = args[0], args[2]
    return (
        x.new_empty(0) if made.dx is None else made.dx,
        topk_weights.new_empty(0) if made.dtopk_weights is None else made.dtopk_weights.to(topk_weights.dtype),
    )


def _backward_main_grad_fake(dy, z, *args):
    needs, x, topk_weights = args[_NUM_CALL].split(), args[0], args[2]
    return tuple(torch.empty_like(like) if name in needs else like.new_empty(0) for name, like in (("x", x), ("topk_weights", topk_weights)))


def _save_for_backward(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], output[2])
    ctx.handle, ctx.options = inputs[_NUM_TENSORS:_NUM_CALL]
    # Not saved tensors: several micro-batches add into them before the first of their backwards runs.
    ctx.main_grads = inputs[_NUM_CALL:]
    ctx.buffer = buffer_of(ctx.handle)  # outlives the graph


def _gemm1_backward(ctx, dy, _da, _dz):
    gradients: list[Tensor | None] = [None] * (_NUM_CALL + len(ctx.main_grads))
    needs = [name for name, positions in _NEEDED_BY.items() if any(ctx.needs_input_grad[position] for position in positions)]
    if dy is None or not needs:
        return tuple(gradients)
    *tensors, z = ctx.saved_tensors
    call = (dy.contiguous(), z, *tensors, ctx.handle, ctx.options, " ".join(needs))
    if ctx.main_grads:
        _add_into_main_grads(gradients, call, ctx.main_grads, needs)
        return tuple(gradients)
    made = iter(backward(*call))
    for name in needs:
        for position in _NEEDED_BY[name]:
            if tensors[position] is not None:
                gradients[position] = next(made)
    return tuple(gradients)


def _add_into_main_grads(gradients: list[Tensor | None], call: tuple, main_grads: tuple, needs: list[str]) -> None:
    if torch.is_grad_enabled():  # create_graph=True; this operator cannot carry a formula that would refuse later
        raise RuntimeError(_NO_DOUBLE_BACKWARD)
    for name, gradient in zip(("x", "topk_weights"), backward_main_grad(*call, *main_grads)):
        if name in needs:
            gradients[_NEEDED_BY[name][0]] = gradient


def _gemm2_backward(ctx, dy):
    return (dy, *[None] * (1 + _NUM_CALL))


_NO_DOUBLE_BACKWARD = (
    "mega_moe cannot be differentiated twice: the backward of mega_moe has no derivative; expected a first-order backward (create_graph=False)"
)


def _refuse_double_backward(ctx, *gradients):
    raise RuntimeError(_NO_DOUBLE_BACKWARD)


def _with_device(impl):
    def guarded(first, *args):  # every operator has a tensor first
        with on_device(first.device):
            return impl(first, *args)

    return guarded


def _register(name: str, impl, fake, differentiate=None, setup_context=None) -> None:
    library.impl(name, impl, "CPU")
    library.impl(name, _with_device(impl), "CUDA")
    torch.library.register_fake(f"deep_gemm::{name}", fake, lib=library)
    if differentiate is not None:
        torch.library.register_autograd(f"deep_gemm::{name}", differentiate, setup_context=setup_context, lib=library)


_register("mega_moe_gemm1", _gemm1_impl, _gemm1_fake, _gemm1_backward, _save_for_backward)
_register("mega_moe_gemm1_main_grad", _gemm1_impl, _gemm1_fake, _gemm1_backward, _save_for_backward)
_register("mega_moe_gemm2", _gemm2_impl, _gemm2_fake, _gemm2_backward)
_register("mega_moe_backward", _backward_impl, _backward_fake, _refuse_double_backward)
_register("mega_moe_backward_main_grad", _backward_main_grad_impl, _backward_main_grad_fake)
