"""FP8 casts with block scales, and the way back: `value = dequantize(q, sf, block) ~ x`.

E4M3 has 3 mantissa bits, a largest finite value of 448 and no infinity. In every cast
- a block's scale comes from its largest finite magnitude, amax; the block's elements become `x / sf`, clamped to +-448, then rounded to
  nearest even (the clamp is explicit: beyond 448 some casts saturate and some give NaN);
- a NaN or infinite element becomes NaN, and touches no other element: a fault stays visible and stays where it was;
- an all-zero block has scale 1;
- a scale is never below 2^-126, the smallest normal FP32 number, so a block keeps full relative precision down to amax = 5.3e-36. (A floor of
  1e-4, as in common training code, turns gradients below 1e-7 into zeros.)
Inputs are read as FP32. Dimensions that are no multiple of the block have a smaller last block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
MIN_SCALE = 2.0**-126


def _check(x: torch.Tensor, block: tuple[int, int]) -> None:
    if not x.is_floating_point() or x.element_size() < 2:
        raise TypeError(f"x.dtype = {x.dtype}: expected float16, bfloat16, float32 or float64")
    if x.dim() < 2:
        raise ValueError(f"x.shape = {tuple(x.shape)}: expected at least 2 dimensions, [..., rows, columns]")
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"block = {block!r}: expected (rows, columns), both at least 1")


def _block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest finite magnitude of each block of x [..., M, N]: [..., ceil(M / rows), ceil(N / columns)]."""
    rows, cols = block
    magnitude = torch.where(x.isfinite(), x.abs(), 0)
    magnitude = F.pad(magnitude, (0, -x.shape[-1] % cols, 0, -x.shape[-2] % rows))
    return magnitude.unflatten(-1, (magnitude.shape[-1] // cols, cols)).unflatten(-3, (magnitude.shape[-2] // rows, rows)).amax((-3, -1))


def _expand(sf: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    return sf.repeat_interleave(block[0], -2)[..., : shape[-2], :].repeat_interleave(block[1], -1)[..., : shape[-1]]


def _power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """The smallest 2^e with amax <= 448 * 2^e, by the bits of amax [FP32], so that no rounding of a division or a logarithm comes in.

    448 = 1.75 * 2^8: for amax = m * 2^k with 1 <= m < 2, e = k - 8, or one more if m > 1.75 (mantissa bits beyond 0x600000).
    """
    bits = amax.view(torch.int32)
    biased = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    scale = (biased.clamp(min=1) << 23).view(torch.float32)
    return torch.where(amax == 0, 1.0, scale)


def _quotient(x: torch.Tensor, sf: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    scaled = (x / _expand(sf, block, x.shape)).clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(x.isfinite(), scaled, torch.nan).to(torch.float8_e4m3fn)


def cast_to_fp8(x: torch.Tensor, block: tuple[int, int] = (1, 128), *, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one FP32 scale per block.

    x             [..., M, N] floating, any strides
    block         (rows, columns): (1, 128) activations and gradients along the contraction, (128, 128) weights, (128, 1) operands of a weight
                  gradient, whose contraction runs over the rows
    power_of_two  round the scales up to powers of two; Hopper does not need it and is more accurate without
    Returns       q [..., M, N] float8_e4m3fn; sf [..., ceil(M / rows), ceil(N / columns)] float32
    """
    _check(x, block)
    x = x.float()
    amax = _block_amax(x, block)
    sf = _power_of_two_scale(amax) if power_of_two else torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp(min=MIN_SCALE))
    return _quotient(x, sf, block), sf


def cast_to_mxfp8(x: torch.Tensor, block: tuple[int, int] = (1, 32)) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one UE8M0 scale (a power of two, rounded up so that nothing saturates) per block of 32.

    x        [..., M, N] floating, any strides
    block    (1, 32), or (32, 1) for a contraction over the rows
    Returns  q [..., M, N] float8_e4m3fn; sf [..., ceil(M / rows), ceil(N / columns)] float8_e8m0fnu (the biased exponent, one byte)
    """
    q, sf = cast_to_fp8(x, block, power_of_two=True)
    # A direct cast would round the scale to nearest; its exponent field already is the byte that is wanted.
    return q, (sf.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)


def dequantize(q: torch.Tensor, sf: torch.Tensor, block: tuple[int, int], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`q * sf` of each block, in `dtype`; the inverse of `cast_to_fp8` and `cast_to_mxfp8` for the same `block`.

    q [..., M, N] float8_e4m3fn; sf [..., ceil(M / rows), ceil(N / columns)] float32 or float8_e8m0fnu. The product is made in FP32, or in FP64
    (where it is exact) for dtype = float64.
    """
    expected = (*q.shape[:-2], -(-q.shape[-2] // block[0]), -(-q.shape[-1] // block[1]))
    if tuple(sf.shape) != expected:
        raise ValueError(f"sf.shape = {tuple(sf.shape)}: expected {expected} for q.shape = {tuple(q.shape)} in blocks of {tuple(block)}")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (q.to(wide) * _expand(sf.to(wide), block, q.shape)).to(dtype)
