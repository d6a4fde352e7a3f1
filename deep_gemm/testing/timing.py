"""Timing with device events: medians of single calls, sustained load, competitors in alternation, a cold L2.

The card is power-limited, so a burst and a sustained run differ by up to 20 %: `single` is 3 warm-ups and then calls one by one; `sustained` is
the median over the second half of some seconds back to back. A ratio between systems is taken from `alternate` only, which runs
them in turn in one run, so that clock and temperature are the same for both. On a machine without a GPU the same code reads the host's clock.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

_L2_FLUSH_BYTES = 256 << 20  # 5x the 50 MiB L2 of an H200
_IN_FLIGHT = 8  # calls queued ahead in a sustained run: enough to hide launches, few enough to stop in time


@dataclass(frozen=True)
class Timing:
    median_ms: float
    p10_ms: float
    p90_ms: float
    sustained_ms: float | None = None

    @classmethod
    def of(cls, samples_ms: list[float]) -> Timing:
        if not samples_ms:
            raise ValueError("samples_ms is empty: expected at least one measured call")
        ordered = sorted(samples_ms)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


class _HostMark:
    """The host clock behind the interface of a device event."""

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _HostMark) -> float:
        return (end.seconds - self.seconds) * 1e3


def _mark():
    return torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else _HostMark()


class L2Flush:
    """Calling it overwrites more memory than the L2 holds, on the current stream, so that the next kernel starts cold. No effect without a GPU."""

    def __init__(self):
        self._memory = torch.empty(_L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda") if torch.cuda.is_available() else None

    def __call__(self) -> None:
        if self._memory is not None:
            self._memory.zero_()


def _once(fn: Callable[[], object], before: Callable[[], None] | None) -> float:
    if before is not None:
        before()
    begin, end = _mark(), _mark()
    begin.record()
    fn()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def single(fn: Callable[[], object], *, warmups: int = 3, calls: int = 10, before: Callable[[], None] | None = None) -> Timing:
    """`warmups` calls, then `calls` measured ones. before: run ahead of each call outside the measured span (a barrier, an `L2Flush`)."""
    return alternate({"": fn}, warmups=warmups, calls=calls, before=before)[""]


def alternate(
    systems: Mapping[str, Callable[[], object]],
    *,
    warmups: int = 3,
    calls: int = 10,
    before: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """`single` for each of several systems, one call of each in turn."""
    samples: dict[str, list[float]] = {name: [] for name in systems}
    for round_ in range(warmups + calls):
        for name, fn in systems.items():
            elapsed = _once(fn, before)
            if round_ >= warmups:
                samples[name].append(elapsed)
    return {name: Timing.of(values) for name, values in samples.items()}


def sustained_ms(fn: Callable[[], object], *, seconds: float = 3.0) -> float:
    """Median time of a call over the second half of `seconds` back to back, milliseconds. A collective `fn` must be called equally
    often on every rank: see `sustained_calls`."""
    return _back_to_back(fn, lambda calls, elapsed: elapsed >= seconds)


def sustained_calls(fn: Callable[[], object], *, calls: int) -> float:
    """As `sustained_ms`, for a fixed number of calls."""
    return _back_to_back(fn, lambda done, elapsed: done >= calls)


def _back_to_back(fn: Callable[[], object], finished: Callable[[int, float], bool]) -> float:
    marks, in_flight = [_mark()], deque()
    marks[0].record()
    start = time.perf_counter()
    while not finished(len(marks) - 1, time.perf_counter() - start) or len(marks) < 3:
        fn()
        marks.append(_mark())
        marks[-1].record()
        in_flight.append(marks[-1])
        if len(in_flight) > _IN_FLIGHT:
            in_flight.popleft().synchronize()
    marks[-1].synchronize()
    samples = [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]
    half, elapsed = marks[0].elapsed_time(marks[-1]) / 2, 0.0
    for index, sample in enumerate(samples):
        elapsed += sample
        if elapsed > half:
            return statistics.median(samples[index:])
    return samples[-1]


def with_sustained(timing: Timing, sustained: float) -> Timing:
    return replace(timing, sustained_ms=sustained)
