"""Checks of the arguments of every call, before anything is launched or sent; the only place that makes a `Problem`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deep_gemm import environment
from deep_gemm.activation import SwiGLU, resolve_activation
from deep_gemm.mega.backend import GRADIENTS, PRECISIONS, Problem, WeightGrads
from deep_gemm.mega.buffer import check_precision
from deep_gemm.reference.exchange import check_ids

if TYPE_CHECKING:
    from deep_gemm.mega.buffer import MegaMoeBuffer

SAVE_POLICIES = ("recompute", "preact")
X_DTYPES = {"reference": (torch.bfloat16, torch.float32, torch.float64), "cuda": (torch.bfloat16,), "fused": (torch.bfloat16,)}
CUDA_POINTER_ALIGNMENT = 16  # bytes: what TMA and 128-bit loads need


@dataclass(frozen=True)
class CallOptions:
    """The options of a call that are not tensors. Registered ops carry them as one string: few arguments, readable in a graph."""

    activation: SwiGLU
    precision: str
    save: str
    backend: str


def check_save(save: object) -> None:
    if save not in SAVE_POLICIES:
        raise ValueError(f"save = {save!r}: expected one of {list(SAVE_POLICIES)}")


def _number(name: str, value: object) -> float | None:
    if value is None or isinstance(value, (int, float)):
        return None if value is None else float(value)
    raise TypeError(f"{name} = {value!r} ({type(value).__name__}): expected a number or None")


def encode_options(
    buffer: MegaMoeBuffer,
    activation: str,
    activation_clamp: float | None,
    activation_alpha: float | None,
    save: str,
    precision: str | None,
    backend: str | None,
) -> str:
    clamp, alpha = _number("activation_clamp", activation_clamp), _number("activation_alpha", activation_alpha)
    return f"{activation};{clamp};{alpha};{save};{precision or buffer.precision};{backend or buffer.backend_name}"


@lru_cache(maxsize=256)
def decode_options(text: str) -> CallOptions:
    """Resolved and checked; ValueError or NotImplementedError names the option at fault."""
    name, clamp, alpha, save, precision, backend = text.split(";")
    activation = resolve_activation(name, *(None if value == "None" else float(value) for value in (clamp, alpha)))
    check_save(save)
    if backend not in PRECISIONS:
        raise ValueError(f"backend = {backend!r}: expected None or one of {list(PRECISIONS)}")
    check_precision(precision, backend)
    return CallOptions(activation, precision, save, backend)


def split(name: str, value: Tensor | tuple[Tensor, Tensor] | list[Tensor]) -> tuple[Tensor, ...]:
    """One tensor -> (it,); a pair (gate, up) -> the pair."""
    parts = (value,) if isinstance(value, Tensor) else value
    if not isinstance(parts, (tuple, list)) or len(parts) not in (1, 2) or not all(isinstance(part, Tensor) for part in parts):
        raise TypeError(f"{name} = {type(value).__name__}: expected a tensor (gate and up stacked) or a pair (gate, up) of tensors")
    return tuple(parts)


def check_types(buffer: object, **tensors: object) -> None:
    """Every named value is a tensor and `buffer` a buffer. Cheap, and traceable by torch.compile."""
    if not hasattr(buffer, "handle"):
        raise TypeError(f"buffer = {type(buffer).__name__}: expected a MegaMoeBuffer (get_symm_buffer_for_mega_moe)")
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} = {type(value).__name__}: expected a torch.Tensor")


def _stated(name: str, tensor: Tensor) -> str:
    return f"{name}.shape = {tuple(tensor.shape)}"


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device, why: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{_stated(name, tensor)}: expected {tuple(shape)} = {why}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}.dtype = {tensor.dtype}: expected {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name}.device = {tensor.device}: expected {device}, the device of the buffer")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: strides {tuple(tensor.stride())}, expected row-major; pass {name}.contiguous()")


def _check_x(x: Tensor, buffer: MegaMoeBuffer, backend: str) -> None:
    if x.dim() != 2 or x.shape[1] != buffer.hidden:
        raise ValueError(f"{_stated('x', x)}: expected (T, {buffer.hidden}) = [T, hidden]")
    if x.shape[0] > buffer.num_max_tokens_per_rank:
        raise ValueError(
            f"{_stated('x', x)}: T = {x.shape[0]} tokens, expected at most num_max_tokens_per_rank = {buffer.num_max_tokens_per_rank} of the buffer"
        )
    _check_tensor("x", x, x.shape, X_DTYPES[backend], buffer.device, "[T, hidden]")


def _check_split(name: str, parts: tuple[Tensor, ...], tail: tuple[int, ...], why: str, dtype: torch.dtype, buffer: MegaMoeBuffer) -> None:
    """`parts` of w13 or b13: one tensor of 2I rows or two of I."""
    rows = buffer.intermediate_hidden * (2 if len(parts) == 1 else 1)
    label = "2 * intermediate_hidden" if len(parts) == 1 else "intermediate_hidden"
    for position, part in enumerate(parts):
        part_name = name if len(parts) == 1 else f"{name}[{position}]"
        _check_tensor(part_name, part, (buffer.num_local_experts, rows, *tail), (dtype,), buffer.device, f"[num_local_experts, {label}{why}]")


def _check_biases(b13: tuple[Tensor, ...] | None, b2: Tensor | None, w13: tuple[Tensor, ...], dtype: torch.dtype, buffer: MegaMoeBuffer) -> None:
    if (b13 is None) != (b2 is None):
        given, missing = ("b13", "b2") if b2 is None else ("b2", "b13")
        raise ValueError(f"{given} was given without {missing}: expected both expert biases or none (pass zeros for an absent one)")
    if b13 is None or b2 is None:
        return
    if len(b13) != len(w13):
        raise ValueError(f"b13 has {len(b13)} part(s), w13 has {len(w13)}: expected the same split, one tensor or a pair (gate, up) each")
    _check_split("b13", b13, (), "", dtype, buffer)
    _check_tensor("b2", b2, (buffer.num_local_experts, buffer.hidden), (dtype,), buffer.device, "[num_local_experts, hidden]")


def _check_shapes(problem: Problem, backend: str, topk_weights: Tensor) -> None:
    x, buffer = problem.x, problem.buffer
    _check_x(x, buffer, backend)
    routing = (x.shape[0], buffer.num_topk)
    _check_tensor("topk_idx", problem.topk_idx, routing, (torch.int64, torch.int32), buffer.device, "[T, num_topk]")
    weight_dtypes = (torch.float32, torch.bfloat16) + ((torch.float64,) if x.dtype == torch.float64 else ())
    _check_tensor("topk_weights", topk_weights, routing, weight_dtypes, buffer.device, "[T, num_topk]")
    _check_split("w13", problem.w13, (buffer.hidden,), ", hidden", x.dtype, buffer)
    shape = (buffer.num_local_experts, buffer.hidden, buffer.intermediate_hidden)
    _check_tensor("w2", problem.w2, shape, (x.dtype,), buffer.device, "[num_local_experts, hidden, intermediate_hidden]")
    _check_biases(problem.b13, problem.b2, problem.w13, x.dtype, buffer)


def is_aligned(tensor: Tensor) -> bool:
    """A contiguous view of another tensor may begin at any element."""
    return tensor.data_ptr() % CUDA_POINTER_ALIGNMENT == 0


def check_alignment(**named: tuple[Tensor, ...]) -> None:
    """ValueError for what the kernels could not read."""
    for name, parts in named.items():
        for tensor in parts:
            if not is_aligned(tensor):
                raise ValueError(f"{name}.data_ptr() = {tensor.data_ptr():#x}: expected an address that is a multiple of {CUDA_POINTER_ALIGNMENT} bytes")


def _check_values(problem: Problem) -> None:
    """What only real tensors have: addresses and ids. Ids on CUDA are checked by the kernels, without a sync, unless DG_DEBUG=1."""
    if problem.x.device.type == "cuda":
        check_alignment(x=(problem.x,), w13=problem.w13, w2=(problem.w2,))
        if problem.b13 is not None and problem.b2 is not None:
            check_alignment(b13=problem.b13, b2=(problem.b2,))
        if not environment.flag("DG_DEBUG"):
            return
    check_ids(problem.topk_idx, problem.buffer.num_experts)


def make_problem(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w13: tuple[Tensor, ...],
    w2: Tensor,
    b13: tuple[Tensor, ...] | None,
    b2: Tensor | None,
    buffer: MegaMoeBuffer,
    options: CallOptions,
    *,
    check: str = "all",
) -> Problem:
    """check: "all", "shapes" (fake tensors have no values), or "none" (the later ops of a call whose first one has checked)."""
    weights = topk_weights.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    problem = Problem(x, topk_idx, weights, w13, w2, b13, b2, options.activation, options.precision, options.save, buffer)
    if check != "none":
        _check_shapes(problem, options.backend, topk_weights)
    if check == "all":
        _check_values(problem)
    return problem


def check_dy(dy: object, problem: Problem) -> None:
    if not isinstance(dy, Tensor):
        raise TypeError(f"dy = {type(dy).__name__}: expected a torch.Tensor")
    _check_tensor("dy", dy, problem.x.shape, (problem.x.dtype,), problem.buffer.device, "[T, hidden], as y")
    if dy.device.type == "cuda":
        check_alignment(dy=(dy,))


def check_needs(needs: object, problem: Problem) -> frozenset[str]:
    """`needs` without the biases' names where there are no biases."""
    if isinstance(needs, str) or not isinstance(needs, Collection) or not all(name in GRADIENTS for name in needs):
        raise ValueError(f"needs = {needs!r}: expected a collection of names out of {list(GRADIENTS)}")
    return frozenset(needs) - (frozenset(("b13", "b2")) if problem.b13 is None else frozenset())


def weight_grads(
    given: Mapping[str, Tensor | tuple[Tensor, Tensor] | None],
    problem: Problem,
    needs: frozenset[str],
    *,
    accumulate: bool,
    dtype: torch.dtype,
    label: str = "d{}",
) -> WeightGrads:
    """Checked targets. `given`: "w13", "w2", "b13", "b2" -> target or None; `label` makes the argument's name for errors."""
    allowed = (torch.bfloat16, torch.float32) + ((torch.float64,) if problem.x.dtype == torch.float64 else ())
    if dtype not in allowed:
        raise TypeError(f"wgrad_dtype = {dtype}: expected {' or '.join(map(str, allowed))}")
    targets: dict[str, tuple[Tensor, ...] | None] = {}
    for name in ("w13", "w2", "b13", "b2"):
        value, argument = given.get(name), label.format(name)
        if value is None:
            if accumulate and name in needs:
                raise ValueError(f"{argument} = None: expected the tensor to add into, because gradients accumulate and {name!r} needs one")
            targets[name] = None
            continue
        if name not in needs:
            raise ValueError(f"{argument} was given, but needs = {sorted(needs)} lacks {name!r}: expected no target for a gradient that is not made")
        like = getattr(problem, name)
        targets[name] = _check_targets(argument, split(argument, value), (like,) if isinstance(like, Tensor) else like, allowed)
    w2, b2 = (None if targets[name] is None else targets[name][0] for name in ("w2", "b2"))
    return WeightGrads(targets["w13"], w2, targets["b13"], b2, accumulate, dtype)


def _check_targets(name: str, parts: tuple[Tensor, ...], like: tuple[Tensor, ...], dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, ...]:
    if len(parts) != len(like):
        raise ValueError(f"{name} has {len(parts)} part(s): expected {len(like)}, the split of what it is the gradient of")
    for position, (part, one) in enumerate(zip(parts, like)):
        part_name = name if len(parts) == 1 else f"{name}[{position}]"
        _check_tensor(part_name, part, tuple(one.shape), dtypes, one.device, "the shape of what it is the gradient of")
    return parts
