"""Error measures of a result against a more exact one, all in FP64.

    rel_frobenius = |a - t| / |t|          diff = 1 - 2 <a, t> / (<a, a> + <t, t>)          max_row_rel = max over rows of |a_r - t_r| / |t_r|

The first two do not see a few wrong rows; the third does. A row is the last dimension. 0 / 0 counts as 0, so a truth of exact zeros asks for
exact zeros. A NaN anywhere makes all three NaN, and NaN meets no bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_CHUNK_ELEMENTS = 1 << 26  # FP64 temporaries stay near 1 GiB whatever the tensor


@dataclass(frozen=True)
class Errors:
    rel_frobenius: float
    diff: float
    max_row_rel: float

    def __str__(self) -> str:
        return f"rel_frobenius={self.rel_frobenius:.3e} diff={self.diff:.3e} max_row_rel={self.max_row_rel:.3e}"


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    return torch.where((numerator == 0) & (denominator == 0), 0.0, numerator / denominator)


def measure_errors(actual: torch.Tensor, truth: torch.Tensor, *, row_floor: float = 0.0) -> Errors:
    """Errors of `actual` against `truth`: same shape, floating, same device.

    row_floor  a row of the truth counts as at least this fraction of the root-mean-square row norm. 0 is the plain definition; 1 suits rows
               of few elements, whose norm may vanish by chance (the router-weight gradient).
    """
    if actual.shape != truth.shape:
        raise ValueError(f"actual.shape = {tuple(actual.shape)}: expected {tuple(truth.shape)}, the shape of truth")
    if actual.numel() == 0:
        return Errors(0.0, 0.0, 0.0)
    rows_a, rows_t = (x.detach().reshape(-1, x.shape[-1] if x.dim() else 1) for x in (actual, truth))
    step = max(1, _CHUNK_ELEMENTS // rows_a.shape[1])
    parts = []
    for begin in range(0, rows_a.shape[0], step):
        a, t = rows_a[begin : begin + step].double(), rows_t[begin : begin + step].double()
        parts.append(torch.stack([(a - t).square().sum(1), t.square().sum(1), (a * a).sum(1), (a * t).sum(1)]))
    delta2, truth2, actual2, inner = torch.cat(parts, 1)
    floor = row_floor * truth2.mean().sqrt()
    row_rel = _ratio(delta2.sqrt(), truth2.sqrt().clamp(min=floor))
    total = torch.stack([delta2.sum(), truth2.sum(), actual2.sum(), inner.sum()])
    rel = _ratio(total[0].sqrt(), total[1].sqrt())
    # 1 - 2<a,t>/(<a,a>+<t,t>) = |a-t|^2 / (<a,a>+<t,t>), which does not cancel for nearly equal tensors.
    diff = _ratio(total[0], total[1] + total[2])
    return Errors(*torch.stack([rel, diff, row_rel.max()]).tolist())  # torch's max hands a NaN on


def assert_close(
    actual: torch.Tensor,
    truth: torch.Tensor,
    *,
    rel_frobenius: float = math.inf,
    diff: float = math.inf,
    max_row_rel: float = math.inf,
    row_floor: float = 0.0,
    name: str = "actual",
) -> Errors:
    """Measure, and raise AssertionError naming the tensor, every measure and its bound unless all are met. NaN and infinity never pass."""
    errors = measure_errors(actual, truth, row_floor=row_floor)
    return check_errors(errors, rel_frobenius=rel_frobenius, diff=diff, max_row_rel=max_row_rel, name=name)


def check_errors(errors: Errors, *, name: str, **bounds: float) -> Errors:
    for measure, bound in bounds.items():
        value = getattr(errors, measure)
        if not (math.isfinite(value) and value <= bound):
            raise AssertionError(f"{name}: {measure} = {value:.3e}, expected <= {bound:.3e} ({errors})")
    return errors


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, *, name: str = "actual") -> None:
    """Same shape, dtype and bits. NaNs with equal bits are equal, +0 and -0 are not."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(f"{name}: {actual.dtype} {tuple(actual.shape)}, expected {expected.dtype} {tuple(expected.shape)}")
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    bits_a, bits_e = (x.detach().contiguous().view(integer) for x in (actual, expected))
    if not torch.equal(bits_a, bits_e):
        where = (bits_a != bits_e).nonzero()
        index = tuple(where[0].tolist())
        raise AssertionError(
            f"{name}: {len(where)} of {actual.numel()} elements differ in bits, first at {index}: {actual[index]} != {expected[index]}"
        )
