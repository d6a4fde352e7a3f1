"""The gated activation and its closed-form derivative, as functions of values (formulas: `deep_gemm/activation.py`)."""

from __future__ import annotations

import math

import torch

from ..activation import SwiGLU


def _clamped(gate: torch.Tensor, up: torch.Tensor, act: SwiGLU) -> tuple[torch.Tensor, torch.Tensor]:
    if math.isinf(act.clamp):
        return gate, up
    return gate.clamp(max=act.clamp), up.clamp(-act.clamp, act.clamp)


def swiglu(gate: torch.Tensor, up: torch.Tensor, act: SwiGLU) -> torch.Tensor:
    """`gate' * sigmoid(alpha * gate') * (up' + up_offset)`; gate, up: same shape and floating dtype, which the result has too."""
    gate, up = _clamped(gate, up, act)
    return gate * torch.sigmoid(act.alpha * gate) * (up + act.up_offset)


def dswiglu(gate: torch.Tensor, up: torch.Tensor, da: torch.Tensor, act: SwiGLU) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `swiglu` with respect to gate and up, given `da`, the gradient of its result.

        s = sigmoid(alpha * gate')      d(gate' * s)/dgate' = s * (1 + alpha * gate' * (1 - s))

    A clamped value gets zero; a NaN is not clamped, so it stays visible in the gradient.
    """
    gate_c, up_c = _clamped(gate, up, act)
    sigmoid = torch.sigmoid(act.alpha * gate_c)
    dgate = da * (up_c + act.up_offset) * sigmoid * (1 + act.alpha * gate_c * (1 - sigmoid))
    dup = da * gate_c * sigmoid
    if math.isinf(act.clamp):
        return dgate, dup
    return dgate.masked_fill(gate > act.clamp, 0), dup.masked_fill(up.abs() > act.clamp, 0)
