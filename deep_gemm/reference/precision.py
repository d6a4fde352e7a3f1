"""Which operands of the six GEMMs a precision quantises, and along which axis.

Blocks are (rows x columns) of the operand as stored; each holds one scale. Contraction axes: H in gemm1 and dgrad2, I in gemm2, 2I in dgrad1
(gate and up columns apart), the rows of one expert ("tokens", counted from the first row of its segment) in the weight gradients.

| GEMM   | product             | `fp8`                              | `mxfp8`                     | `fp8_bwd`  | `bf16` |
|--------|---------------------|------------------------------------|-----------------------------|------------|--------|
| gemm1  | x . W13^T           | x 1x128, W13 128x128               | x 1x32, W13 1x32 along H    | -          | -      |
| gemm2  | a . W2^T            | a 1x128, W2 128x128                | a 1x32, W2 1x32 along I     | -          | -      |
| dgrad2 | dy . W2             | dy 1x128, W2 128x128               | dy 1x32, W2 32x1 along H    | as `fp8`   | -      |
| dgrad1 | dZ . W13            | dZ 1x128, W13 128x128              | dZ 1x32, W13 32x1 along I   | as `fp8`   | -      |
| wgrad2 | dy^T . (p * a)      | both 128x1 along tokens            | both 32x1 along tokens      | -          | -      |
| wgrad1 | dZ^T . x            | both 128x1 along tokens            | both 32x1 along tokens      | -          | -      |

`-` = operands as given. Elements are E4M3; scales FP32, not rounded (`fp8`), or UE8M0 (`mxfp8`). Sums, biases, the activation, the routing
weights and dp stay in FP32/FP64 and see unquantised values. 128x128 blocks survive a transpose: dgrads see the same weights as the forward.
Gate and up weights are blocked apart, so a pair (W1, W3) and one W13 mean the same numbers for every I.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..quant import cast_to_fp8, cast_to_mxfp8, dequantize

Cast = Callable[[torch.Tensor], torch.Tensor]


def _keep(x: torch.Tensor) -> torch.Tensor:
    return x


def _quantized(cast: Callable, block: tuple[int, int]) -> Cast:
    """Cast and back, in the dtype of the operand."""

    def through(x: torch.Tensor) -> torch.Tensor:
        q, sf = cast(x, block)
        return dequantize(q, sf, block, dtype=x.dtype)

    return through


@dataclass(frozen=True)
class Operands:
    """What a GEMM does to its operands, each of which comes with the contraction as its last axis, or as its first for `tokens`."""

    rows: Cast = _keep
    weight: Cast = _keep
    tokens: Cast = _keep


@dataclass(frozen=True)
class Precision:
    """forward: gemm1, gemm2; dgrad: dgrad2, dgrad1; wgrad: wgrad2, wgrad1."""

    name: str
    forward: Operands = Operands()
    dgrad: Operands = Operands()
    wgrad: Operands = Operands()


_FP8 = Operands(
    rows=_quantized(cast_to_fp8, (1, 128)), weight=_quantized(cast_to_fp8, (128, 128)), tokens=_quantized(cast_to_fp8, (128, 1))
)
_MXFP8 = Operands(
    rows=_quantized(cast_to_mxfp8, (1, 32)), weight=_quantized(cast_to_mxfp8, (1, 32)), tokens=_quantized(cast_to_mxfp8, (32, 1))
)

PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("bf16"),
        Precision("fp8", forward=_FP8, dgrad=_FP8, wgrad=_FP8),
        Precision("mxfp8", forward=_MXFP8, dgrad=_MXFP8, wgrad=_MXFP8),
        Precision("fp8_bwd", dgrad=_FP8),
    )
}


def resolve_precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ValueError(f"precision = {name!r}: expected one of {sorted(PRECISIONS)}")
    return PRECISIONS[name]
