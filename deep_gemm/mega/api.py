"""The public calls of Mega MoE."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from deep_gemm.mega import checks, ops
from deep_gemm.mega.backend import GRADIENTS, on_device
from deep_gemm.mega.buffer import MMA_TYPES, MegaMoeBuffer
from deep_gemm.mega.state import MegaMoeGradients, MegaMoeState, cast, joined

WeightOrPair = Tensor | tuple[Tensor, Tensor]


def get_symm_buffer_for_mega_moe(
    group: Any,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    precision: str = "bf16",
    device: torch.device | str | None = None,
    capacity_factor: float = 1.25,
    backend: str | None = None,
    mma_type: str | None = None,
) -> MegaMoeBuffer:
    """The buffer that all layers of one shape share. Collective: every rank of `group` calls it with the same settings.

    group                    None (one rank), a torch.distributed.ProcessGroup, or a rank of a deep_gemm.testing.VirtualGroup
    num_experts              E, a multiple of the number of ranks R; rank r holds experts r*E/R .. (r+1)*E/R - 1
    num_max_tokens_per_rank  bound on T of every call; sizes the symmetric memory
    num_topk                 K, 1..16, at most E
    hidden, intermediate_hidden  H and I; multiples of 128 on CUDA, any on the reference
    precision                default of the calls: "bf16" | "fp8" | "mxfp8" | "fp8_bwd" (CUDA: "bf16")
    device                   default: the current CUDA device, or the CPU where there is none
    capacity_factor          rows that are held at once, in units of T*K; decides speed and memory, never the bits of y, dx, dp;
                             the weight gradient of an expert that a round cuts is summed in another order
    backend                  "cuda" | "fused" | "reference"; default by device. "fused": as "cuda", with the forward in one launch per rank;
                             checked on a CPU model of the GPU only, so it is not the default yet
    mma_type                 DeepGEMM's word for the precision, as its callers pass it: "bf16xbf16"; None = `precision` decides
    Raises    ValueError / TypeError on every rank for a bad setting or one that differs between ranks (names it and both values);
              BackendUnavailable where the backend cannot run (no GPU, driver too old, no symmetric memory); NotImplementedError (precision)
    """
    if mma_type not in (None, MMA_TYPES["bf16"]) or (mma_type is not None and precision != "bf16"):
        raise NotImplementedError(f"mma_type = {mma_type!r} with precision = {precision!r}: expected None, or {MMA_TYPES['bf16']!r} with 'bf16'")
    return MegaMoeBuffer(
        group,
        device=device,
        backend=backend,
        num_experts=num_experts,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        num_topk=num_topk,
        hidden=hidden,
        intermediate_hidden=intermediate_hidden,
        precision=precision,
        capacity_factor=capacity_factor,
    )


def mega_moe_fwd(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w13: WeightOrPair,
    w2: Tensor,
    buffer: MegaMoeBuffer,
    *,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    activation_alpha: float | None = None,
    b13: WeightOrPair | None = None,
    b2: Tensor | None = None,
    save: str = "recompute",
    precision: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, MegaMoeState]:
    """y[t] = sum_k topk_weights[t,k] * expert(topk_idx[t,k])(x[t]), experts spread over the ranks of `buffer`; no autograd.

    x             [T, H] BF16 (reference: FP32 and FP64 too), row-major, 16-byte aligned on CUDA; 0 <= T <= num_max_tokens_per_rank, any T per rank
    topk_idx      [T, K] int32 or int64, -1 = no expert; an expert named twice by one token counts twice
    topk_weights  [T, K] FP32 or BF16 (FP64 with FP64 x)
    w13           [E_l, 2I, H] gate rows then up rows, or the pair (gate, up) of [E_l, I, H]; dtype of x
    w2            [E_l, H, I]; dtype of x
    b13, b2       expert biases [E_l, 2I] (or a pair of [E_l, I]) and [E_l, H]; dtype of x; both or none. Weights and biases: 16-byte aligned on CUDA
    activation    "swiglu" | "swiglu_oai" (deep_gemm/activation.py); activation_clamp in units of the pre-activation, activation_alpha replace its own
    save          "recompute": backward redoes GEMM 1; "preact": the state keeps the pre-activations
    precision, backend  default: the buffer's
    Returns       y [T, H] in the dtype of x; state, which owns what backward needs (state.nbytes bytes)
    Raises        ValueError / TypeError (argument), NotImplementedError (precision), BackendUnavailable, all before anything is launched or sent;
                  on CUDA the fault that an earlier call recorded (id out of range: ValueError, late peer: PeerTimeoutError)
    Guarantees    same bits on every run; on CUDA no host sync, capturable
    An id out of range is found at the call on CPU tensors and under DG_DEBUG=1; otherwise CUDA kernels record it without a sync, the rows of y
    concerned are NaN, and the next call or `buffer.check()` raises. In an expert-parallel group every rank makes the same calls in the same order;
    if an argument fault stops one rank, its peers wait for it no longer than the bound of the CUDA kernels, or torch.distributed's timeout
    on the reference.
    """
    w13_parts = checks.split("w13", w13)
    b13_parts = None if b13 is None else checks.split("b13", b13)
    checks.check_types(buffer, x=x, topk_idx=topk_idx, topk_weights=topk_weights, w2=w2, **({} if b2 is None else {"b2": b2}))
    options = checks.decode_options(checks.encode_options(buffer, activation, activation_clamp, activation_alpha, save, precision, backend))
    with torch.no_grad(), on_device(buffer.device):
        problem = checks.make_problem(x, topk_idx, topk_weights, w13_parts, w2, b13_parts, b2, buffer, options)
        solver = buffer.backend(options.backend)
        solver.check()
        a, z = solver.gemm1(problem)
        y = solver.gemm2(problem, a)
    return y, MegaMoeState(problem, options.backend, z, topk_weights)


def mega_moe_bwd(
    dy: Tensor,
    state: MegaMoeState,
    *,
    dw13: WeightOrPair | None = None,
    dw2: Tensor | None = None,
    db13: WeightOrPair | None = None,
    db2: Tensor | None = None,
    accumulate: bool = False,
    wgrad_dtype: torch.dtype = torch.float32,
    needs: Collection[str] = GRADIENTS,
    retain: bool = True,
) -> MegaMoeGradients:
    """Gradients of `mega_moe_fwd` at the call that made `state` (docs: "The maths" in the README).

    dy            [T, H] gradient of y, dtype of x, row-major, 16-byte aligned on CUDA
    dw13, dw2, db13, db2  tensors to write the gradients into, in the shape of what they are for (a pair for a pair), BF16 or FP32, row-major;
                  None = a new one in `wgrad_dtype`
    accumulate    add into the given tensors instead (main_grad); every needed weight gradient must then have its tensor
    wgrad_dtype   torch.float32 | torch.bfloat16 (torch.float64 with FP64 x) of new weight gradients
    needs         which gradients to make: names out of "x", "topk_weights", "w13", "w2", "b13", "b2"; work for the others is skipped. Biases' names
                  count only if there are biases. The same on every rank
    retain        False frees the state once backward is enqueued; True (default) keeps it usable
    Returns       dx [T, H] (dtype of x), dtopk_weights [T, K] (dtype of topk_weights), dw13, dw2; attributes db13, db2; None where not needed
    Raises        as mega_moe_fwd; RuntimeError if the state was freed or an input was modified in place since
    """
    if not isinstance(state, MegaMoeState):
        raise TypeError(f"state = {type(state).__name__}: expected the MegaMoeState that mega_moe_fwd returned")
    problem = state.problem
    checks.check_dy(dy, problem)
    wanted = checks.check_needs(needs, problem)
    given = {"w13": dw13, "w2": dw2, "b13": db13, "b2": db2}
    targets = checks.weight_grads(given, problem, wanted, accumulate=accumulate, dtype=wgrad_dtype)
    z = state.preactivations()
    solver = problem.buffer.backend(state.backend_name)
    with torch.no_grad(), on_device(problem.buffer.device):
        solver.check()
        made = solver.backward(problem, dy, z, wanted, targets)
    if not retain:
        state.free()
    return MegaMoeGradients(
        made.dx, cast(made.dtopk_weights, state.topk_weights_dtype), joined(made.dw13), made.dw2, joined(made.db13), made.db2
    )


def mega_moe(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    w13: WeightOrPair,
    w2: Tensor,
    buffer: MegaMoeBuffer,
    *,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    activation_alpha: float | None = None,
    b13: WeightOrPair | None = None,
    b2: Tensor | None = None,
    save: str = "recompute",
    precision: str | None = None,
    backend: str | None = None,
    main_grads: Mapping[str, WeightOrPair] | None = None,
) -> Tensor:
    """`mega_moe_fwd` as a differentiable call: y [T, H]. Arguments, errors and guarantees as there.

    Gradients go to x, topk_weights and the weights that require them, in the dtype of each; frozen ones cost nothing. Compiles with
    torch.compile(fullgraph=True); under non-reentrant activation checkpointing GEMM 2 and the combine are not run again.
    save="preact" saves nothing when no input needs a gradient.
    main_grads    {"w13": ..., "w2": ..., "b13": ..., "b2": ...}: BF16 or FP32 tensors in the shape of the weights (pairs for pairs), into which
                  backward adds the weight gradients; the weights' own `.grad` then stays as it is. Must have one for every weight that
                  requires a gradient. In a compiled layer torch checks them like saved tensors: run each backward before the layer's next
                  forward (eager has no such rule)
    """
    w13_parts = checks.split("w13", w13)
    b13_parts = None if b13 is None else checks.split("b13", b13)
    checks.check_types(buffer, x=x, topk_idx=topk_idx, topk_weights=topk_weights, w2=w2, **({} if b2 is None else {"b2": b2}))
    weights = {"w13": w13_parts, "w2": (w2,), "b13": b13_parts or (), "b2": () if b2 is None else (b2,)}
    trainable = [name for name, parts in weights.items() if any(part.requires_grad for part in parts)] if torch.is_grad_enabled() else []
    if save == "preact" and not (trainable or (torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad))):
        save = "recompute"
    options = checks.encode_options(buffer, activation, activation_clamp, activation_alpha, save, precision, backend)
    call = (x, topk_idx, topk_weights, *_two(w13_parts), w2, *_two(b13_parts), b2, buffer.handle, options)
    if main_grads is None:
        proxy, a, _ = ops.gemm1(*call)
    else:
        proxy, a, _ = ops.gemm1_main_grad(*call, *_main_grad_targets(main_grads, weights, trainable))
    return ops.gemm2(proxy, a, *call)


def _two(parts: tuple[Tensor, ...] | None) -> tuple[Tensor | None, Tensor | None]:
    if parts is None:
        return None, None
    return parts if len(parts) == 2 else (parts[0], None)


def _main_grad_targets(
    main_grads: Mapping[str, WeightOrPair], weights: Mapping[str, tuple[Tensor, ...]], trainable: list[str]
) -> list[Tensor | None]:
    """dw13, dw3, dw2, db13, db3, db2 as the op takes them. Shapes and dtypes are checked with the rest, in the op."""
    unknown = [name for name in main_grads if name not in weights or not weights[name]]
    if unknown:
        raise ValueError(f"main_grads has {unknown}: expected names of weights of this call, {[name for name, parts in weights.items() if parts]}")
    missing = [name for name in trainable if main_grads.get(name) is None]
    if missing:
        raise ValueError(f"main_grads lacks {missing}: expected a tensor for every weight that requires a gradient")
    targets: list[Tensor | None] = []
    for name in ("w13", "w2", "b13", "b2"):
        value = main_grads.get(name)
        parts = None if value is None else checks.split(f"main_grads[{name!r}]", value)
        if parts is not None and len(parts) != len(weights[name]):
            raise ValueError(f"main_grads[{name!r}] has {len(parts)} part(s): expected {len(weights[name])}, the split of {name}")
        targets += _two(parts) if name in ("w13", "b13") else [None if parts is None else parts[0]]
    return targets
