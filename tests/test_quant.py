"""Block casts: scales by independent arithmetic, nearest-even elements, tails, faults that stay where they are, tiny values that survive."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm.quant import MIN_SCALE, cast_to_fp8, cast_to_mxfp8, dequantize

# All non-negative E4M3 values by the definition of the format; an even index is an even mantissa.
E4M3 = torch.tensor(
    [(m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:127], dtype=torch.float64
)


def round_to_e4m3(value: torch.Tensor) -> torch.Tensor:
    """Nearest table entry, ties to the even index; values beyond 448 to 448."""
    magnitude = value.double().abs().clamp(max=448)
    above = torch.searchsorted(E4M3, magnitude).clamp(max=126)
    below = (above - 1).clamp(min=0)
    to_above, to_below = E4M3[above] - magnitude, magnitude - E4M3[below]
    take_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return torch.where(take_above, E4M3[above], E4M3[below]) * value.double().sign()


def independent_scale(amax: float, power_of_two: bool) -> float:
    if amax == 0:
        return 1.0
    if not power_of_two:
        return max((torch.tensor(amax) / 448).item(), MIN_SCALE)
    mantissa, exponent = math.frexp(amax)  # amax = mantissa * 2^exponent, 0.5 <= mantissa < 1; 448 = 0.875 * 2^9
    return 2.0 ** max(exponent - 9 + (mantissa > 0.875), -126)


def cast_by_loop(x: torch.Tensor, block: tuple[int, int], power_of_two: bool) -> torch.Tensor:
    """Cast and back, block by block, in FP64."""
    out = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            part = x[i : i + block[0], j : j + block[1]].float()
            scale = independent_scale(part.abs().max().item(), power_of_two)
            out[i : i + block[0], j : j + block[1]] = round_to_e4m3(part / torch.tensor(scale)) * scale
    return out


def spread(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Values over many magnitudes, so that scales differ between blocks and subnormal E4M3 values appear."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator) * torch.exp2(torch.randint(-12, 12, (rows, cols), generator=generator).float())


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", [(1, 128), (128, 128), (128, 1), (1, 32)])
@pytest.mark.parametrize("shape", [(256, 256), (200, 300), (1, 1), (3, 129)])
def test_cast_equals_a_loop_over_blocks_with_tails(shape, block, power_of_two):
    x = spread(*shape)
    q, sf = cast_to_fp8(x, block, power_of_two=power_of_two)
    assert q.dtype == torch.float8_e4m3fn and sf.dtype == torch.float32
    assert sf.shape == (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
    assert torch.equal(dequantize(q, sf, block, dtype=torch.float64), cast_by_loop(x, block, power_of_two))


@pytest.mark.parametrize("block", [(1, 32), (32, 1)])
def test_mxfp8_equals_the_loop_with_power_of_two_scales(block):
    x = spread(70, 100)
    q, sf = cast_to_mxfp8(x, block)
    assert sf.dtype == torch.float8_e8m0fnu
    assert torch.equal(dequantize(q, sf, block, dtype=torch.float64), cast_by_loop(x, block, True))


@settings(max_examples=300, deadline=None)
@given(st.floats(min_value=0, max_value=float(torch.finfo(torch.float32).max), width=32))
def test_mxfp8_scale_is_the_smallest_power_of_two_that_does_not_saturate(amax):
    byte = cast_to_mxfp8(torch.tensor([[amax]]))[1].view(torch.uint8).item()
    scale = 2.0 ** (byte - 127)
    assert scale == independent_scale(amax, True)
    assert amax <= 448 * scale
    assert amax == 0 or byte == 1 or amax > 448 * scale / 2


@pytest.mark.parametrize("exponent", [-100, -20, 0, 60])
def test_mxfp8_scale_at_the_edge_of_saturation(exponent):
    edge = torch.tensor(448 * 2.0**exponent)
    beyond = torch.nextafter(edge, torch.tensor(math.inf))
    sf = cast_to_mxfp8(torch.stack([edge, beyond])[:, None])[1].float().squeeze(1)
    assert sf.tolist() == [2.0**exponent, 2.0 ** (exponent + 1)]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("exponent", [-27, -100])  # about 1e-8 and 1e-30
def test_tiny_values_keep_full_relative_precision(exponent, power_of_two):
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    q, sf = cast_to_fp8(x, power_of_two=power_of_two)
    tiny_q, tiny_sf = cast_to_fp8(x * 2.0**exponent, power_of_two=power_of_two)
    assert torch.equal(q.view(torch.uint8), tiny_q.view(torch.uint8))
    assert torch.equal(tiny_sf, sf * 2.0**exponent)


def test_scale_below_the_floor_is_a_normal_number():
    x = torch.full((1, 128), 1e-40)
    for sf in (cast_to_fp8(x)[1], cast_to_fp8(x, power_of_two=True)[1], cast_to_mxfp8(x)[1].float()):
        assert (sf == MIN_SCALE).all() and MIN_SCALE >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("cast", [cast_to_fp8, cast_to_mxfp8])
def test_all_zero_block_has_scale_one_and_zeros(cast):
    q, sf = cast(torch.zeros(2, 256))
    assert (sf.float() == 1).all() and (q.float() == 0).all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40), st.booleans())
def test_finite_input_never_gives_nan_and_is_close(values, power_of_two):
    x = torch.tensor([values])
    q, sf = cast_to_fp8(x, power_of_two=power_of_two)
    assert q.float().isfinite().all()
    error = (dequantize(q, sf, (1, 128), dtype=torch.float64) - x.double()).abs()
    # Half a unit in the last place: 2^-4 of a normal value, 2^-10 of the scale for a subnormal one (and a little for the FP32 quotient).
    assert (error <= torch.maximum(x.double().abs() * 2.0**-4, sf.double() * 2.0**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cast, block", [(cast_to_fp8, (1, 128)), (cast_to_fp8, (128, 128)), (cast_to_mxfp8, (1, 32))])
def test_fault_becomes_nan_and_touches_no_other_element(cast, block, fault):
    x = spread(5, 300)
    x[2, 40] = 0
    clean_q, clean_sf = cast(x, block)
    x[2, 40] = fault
    q, sf = cast(x, block)
    assert torch.equal(sf.float(), clean_sf.float())
    expected = clean_q.float()
    expected[2, 40] = math.nan
    assert torch.equal(q.float().nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    assert q.float()[2, 40].isnan()


def test_block_of_nothing_but_faults_is_nan():
    q, sf = cast_to_fp8(torch.full((1, 128), math.nan))
    assert dequantize(q, sf, (1, 128)).isnan().all() and (sf == 1).all()


def test_largest_element_uses_the_whole_range_and_is_clamped():
    # 448.00003 quotients appear here: amax / (amax / 448) rounds up for some amax.
    x = torch.rand(4096, 1, generator=torch.Generator().manual_seed(2)) + 0.5
    assert ((x / (x / 448)) > 448).any()
    assert (cast_to_fp8(x)[0].float() == 448).all()


def test_leading_dimensions_and_strides():
    x = spread(6 * 130, 140).view(6, 130, 140)
    for block in ((1, 128), (128, 128), (128, 1)):
        q, sf = cast_to_fp8(x, block)
        for i in range(6):
            one_q, one_sf = cast_to_fp8(x[i], block)
            assert torch.equal(q[i].float(), one_q.float()) and torch.equal(sf[i], one_sf)
        turned_q, turned_sf = cast_to_fp8(x.transpose(1, 2), block[::-1])
        assert torch.equal(turned_q.float(), q.float().transpose(1, 2)) and torch.equal(turned_sf, sf.transpose(1, 2))


@pytest.mark.parametrize("shape, sf_shape", [((0, 256), (0, 2)), ((3, 0), (3, 0))])
def test_empty_input(shape, sf_shape):
    q, sf = cast_to_fp8(torch.empty(shape))
    assert q.shape == shape and sf.shape == sf_shape and dequantize(q, sf, (1, 128)).shape == shape


def test_power_of_two_scales_are_exact_in_bf16():
    q, sf = cast_to_fp8(spread(64, 256), power_of_two=True)
    assert torch.equal(dequantize(q, sf, (1, 128), dtype=torch.bfloat16).double(), dequantize(q, sf, (1, 128), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_input_is_read_as_fp32(dtype):
    x = spread(4, 256).to(dtype)
    assert torch.equal(cast_to_fp8(x)[0].float(), cast_to_fp8(x.float())[0].float())


@pytest.mark.parametrize(
    "error, pattern, call",
    [
        (TypeError, "x.dtype = torch.int32", lambda: cast_to_fp8(torch.zeros(2, 2, dtype=torch.int32))),
        (TypeError, "x.dtype = torch.float8_e4m3fn", lambda: cast_to_mxfp8(torch.zeros(2, 2).to(torch.float8_e4m3fn))),
        (ValueError, r"x.shape = \(3,\)", lambda: cast_to_fp8(torch.zeros(3))),
        (ValueError, r"block = \(0, 128\)", lambda: cast_to_fp8(torch.zeros(2, 2), (0, 128))),
        (ValueError, r"sf.shape = \(2, 2\): expected \(2, 1\)", lambda: dequantize(*cast_to_fp8(torch.zeros(2, 128), (1, 64)), (1, 128))),
    ],
)
def test_bad_argument_is_named(error, pattern, call):
    with pytest.raises(error, match=pattern):
        call()
