"""DeepGEMM's forward-only names of Mega MoE, thin wrappers over `mega_moe_fwd`.

The caller fills the buffer's views `x`, `topk_idx`, `topk_weights` before each call, as there. Weights stay in their natural layout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deep_gemm.mega import checks
from deep_gemm.mega.api import mega_moe_fwd
from deep_gemm.mega.buffer import MegaMoeBuffer


def transform_weights_for_mega_moe(l1_weights: Any, l2_weights: Any) -> tuple[Any, Any]:
    """Both arguments as they are: these kernels read the layout that trainers hold, l1 [E_l, 2I, H] and l2 [E_l, H, I], and need no copy."""
    return l1_weights, l2_weights


def bf16_mega_moe(
    y: Tensor,
    l1_weights: Tensor,
    l2_weights: Tensor,
    sym_buffer: MegaMoeBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """y[:] = Mega MoE forward of the first T = y.shape[0] rows of `sym_buffer.x`, `.topk_idx`, `.topk_weights`.

    y           [T, H] BF16, T <= sym_buffer.num_max_tokens_per_rank
    l1_weights  [E_l, 2I, H] BF16, gate rows then up rows;  l2_weights [E_l, H, I] BF16
    fast_math   accepted and without effect: there is one form of the activation
    Raises      as mega_moe_fwd; NotImplementedError for cumulative_local_expert_recv_stats
    """
    if cumulative_local_expert_recv_stats is not None:
        raise NotImplementedError("cumulative_local_expert_recv_stats: no kernel counts received rows for the caller yet; pass None")
    checks.check_types(sym_buffer, y=y)
    if y.dtype != sym_buffer.x.dtype:
        raise TypeError(f"y.dtype = {y.dtype}: expected {sym_buffer.x.dtype}")
    if y.dim() != 2 or y.shape[1] != sym_buffer.hidden or y.shape[0] > sym_buffer.num_max_tokens_per_rank:
        raise ValueError(f"y.shape = {tuple(y.shape)}: expected (T, {sym_buffer.hidden}) with T <= {sym_buffer.num_max_tokens_per_rank}")
    num_tokens = y.shape[0]
    result, _ = mega_moe_fwd(
        sym_buffer.x[:num_tokens],
        sym_buffer.topk_idx[:num_tokens],
        sym_buffer.topk_weights[:num_tokens],
        l1_weights,
        l2_weights,
        sym_buffer,
        activation=activation,
        activation_clamp=activation_clamp,
    )
    y.copy_(result)


def fp8_mega_moe(*args: Any, **kwargs: Any) -> None:
    """Not there yet: always raises."""
    raise NotImplementedError(
        "fp8_mega_moe: there are no kernels yet that take FP8 weights with scale factors; use mega_moe_fwd / bf16_mega_moe with BF16 weights, "
        "or precision='fp8' with backend='reference' for its numbers"
    )
