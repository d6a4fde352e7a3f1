"""The backward that belongs to `bf16_mega_moe`, under the name and in the argument order that trainers written for a DeepGEMM fork call."""

from __future__ import annotations

from torch import Tensor

from deep_gemm.mega import checks
from deep_gemm.mega.api import mega_moe_bwd
from deep_gemm.mega.buffer import MegaMoeBuffer
from deep_gemm.mega.state import MegaMoeState


def bf16_mega_moe_backward(
    dx: Tensor,
    dw1: Tensor,
    dw2: Tensor,
    dtopk: Tensor,
    dy: Tensor,
    l1_weights: Tensor,
    l2_weights: Tensor,
    sym_buffer: MegaMoeBuffer,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """Gradients of `bf16_mega_moe` on the first T = dy.shape[0] rows of `sym_buffer.x`, `.topk_idx`, `.topk_weights`, which the caller fills again.

    dx          [T, H] BF16, dtopk [T, K] FP32: written
    dw1         [E_l, 2I, H] (gate rows, then up rows), dw2 [E_l, H, I], BF16 or FP32: written, zeros for an expert without tokens
    dy          [T, H] BF16;  l1_weights, l2_weights and the options as in bf16_mega_moe. GEMM 1 is done again: nothing was kept
    Raises      as mega_moe_bwd
    """
    checks.check_types(sym_buffer, dx=dx, dtopk=dtopk, dy=dy, l2_weights=l2_weights)
    x, topk_idx, topk_weights = (part[: dy.shape[0]] for part in (sym_buffer.x, sym_buffer.topk_idx, sym_buffer.topk_weights))
    for name, given, like in (("dx", dx, x), ("dtopk", dtopk, topk_weights)):
        if given.shape != like.shape or given.dtype != like.dtype:
            raise ValueError(f"{name}: {given.dtype} {tuple(given.shape)}, expected {like.dtype} {tuple(like.shape)}")
    options = checks.decode_options(checks.encode_options(sym_buffer, activation, activation_clamp, None, "recompute", "bf16", None))
    w13 = checks.split("l1_weights", l1_weights)
    problem = checks.make_problem(x, topk_idx, topk_weights, w13, l2_weights, None, None, sym_buffer, options)
    state = MegaMoeState(problem, options.backend, x.new_empty(0), topk_weights)
    gradients = mega_moe_bwd(dy, state, dw13=dw1, dw2=dw2)
    dx.copy_(gradients.dx)
    dtopk.copy_(gradients.dtopk_weights)
