"""The gated activation of the experts, as a value that every backend reads.

    gate' = min(gate, clamp)              up' = min(max(up, -clamp), clamp)
    a     = gate' * sigmoid(alpha * gate') * (up' + up_offset)

`swiglu`: alpha = 1, up_offset = 0, clamp = infinity unless given. `swiglu_oai` (gpt-oss): alpha = 1.702, up_offset = 1, clamp = 7.
The derivative of a clamp is 1 inside and on the bound, 0 outside (as `torch.clamp`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SwiGLU:
    alpha: float = 1.0
    up_offset: float = 0.0
    clamp: float = math.inf


_FP32_MAX = (2 - 2**-23) * 2.0**127  # kernels take the constants in FP32

_DEFAULTS = {"swiglu": SwiGLU(), "swiglu_oai": SwiGLU(alpha=1.702, up_offset=1.0, clamp=7.0)}


def resolve_activation(name: str, clamp: float | None = None, alpha: float | None = None) -> SwiGLU:
    """`name` with its own constants, `clamp` (> 0) and `alpha` replacing them where given; a clamp that no FP32 number exceeds is none."""
    if name not in _DEFAULTS:
        raise ValueError(f"activation = {name!r}: expected one of {sorted(_DEFAULTS)}")
    base = _DEFAULTS[name]
    if clamp is not None and not clamp > 0:
        raise ValueError(f"activation_clamp = {clamp!r}: expected a positive number or None")
    if alpha is not None and not abs(alpha) <= _FP32_MAX:
        raise ValueError(f"activation_alpha = {alpha!r}: expected a finite number (FP32) or None")
    if clamp is not None and clamp >= _FP32_MAX:
        clamp = math.inf
    return SwiGLU(
        alpha=base.alpha if alpha is None else float(alpha),
        up_offset=base.up_offset,
        clamp=base.clamp if clamp is None else float(clamp),
    )
