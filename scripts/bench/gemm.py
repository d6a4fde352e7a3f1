"""Times the GEMMs of a Mega MoE layer alone: ours against torch._grouped_mm, cuBLASLt (torch.matmul) and, where it is installed, QuACK.

    python scripts/bench/gemm.py [--shape qwen3-235b ...] [--part plain ...] [--ep 2] [--tokens 16384] [--sustained-s 3]
                                 [--json results/gemm-h200.json]

Parts: `dense`, `plain` (the six GEMMs of a layer), `accumulate` (FP32 weight gradients in place), `fused` (gated epilogues, gathered rows), `small`
(few rows per group), `host` (time of a call on the host). Single calls with the L2 flushed before each, systems in turn; `sustained`: back to
back, systems in turn as well. Results are checked against torch before they are timed. tflops: 2 * rows * n * k over the median.
Needs deep_gemm installed, or PYTHONPATH=. in the checkout.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gemm_contests as contests
import torch

import deep_gemm
from deep_gemm.testing import MODEL_SHAPES, assert_close, results, timing

PARTS = ("dense", "plain", "accumulate", "fused", "small", "host")


def measure(contest: contests.Contest, options: argparse.Namespace, flush: timing.L2Flush, note: Callable[[float], str] = lambda ms: "") -> list[dict]:
    """note(median_ms): what to say of a time."""
    if contest.checked:
        for system in contest.systems.keys() - {"torch"}:
            assert_close(contest.systems[system](), contest.systems["torch"](), rel_frobenius=5e-3, name=f"{contest.name} {system}")
    measured = timing.alternate(contest.systems, before=flush, calls=options.calls)
    rows = []
    for system, fn in contest.systems.items():
        result = measured[system]
        if options.sustained_s:
            result = timing.with_sustained(result, timing.sustained_ms(fn, seconds=options.sustained_s))
        rows.append(results.timing_row(contest.name, system, "gemm", result, flops=contest.flops, notes=note(result.median_ms)))
    best = rows[0]["median_ms"], rows[0]["sustained_ms"]
    print(f"{contest.name:40}", *(
        f"{row['system']} {row['median_ms']:.3f} ms {row['tflops']:.0f} TFLOP/s ({row['median_ms'] / best[0]:.3f}"
        + (f"|{row['sustained_ms'] / best[1]:.3f})" if best[1] else ")") + (f" {row['notes']}" if row["notes"] else "") for row in rows
    ), flush=True)  # fmt: skip
    return rows


def contests_of(part: str, options: argparse.Namespace) -> Iterator[contests.Contest]:
    if part == "dense":
        yield from (contests.dense(*shape) for shape in contests.DENSE)
    layers = {"plain": contests.plain_layer, "accumulate": contests.accumulating_layer, "fused": contests.fused_layer}
    if part in layers:
        for name in options.shape:
            yield from layers[part](name, options.tokens, options.ep)


def copy_bandwidth() -> float:
    """Bytes read and written per ms by a copy of 2 GiB."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timing.single(lambda: target.copy_(source)).median_ms


def small_rows(options: argparse.Namespace, flush: timing.L2Flush) -> list[dict]:
    rows, bandwidth = [], copy_bandwidth()
    for contest in contests.small_groups():
        rows += measure(contest, options, flush, lambda ms, b=contest.weight_bytes: f"weights once at {b / ms / bandwidth:.2f} of copy bandwidth")
    return rows


def host_rows() -> list[dict]:
    """Host time of a call that was made before, and of a plan: the best of 20 runs of 50 calls that the GPU does not hold up."""
    a, b = (torch.randn(128, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    d = torch.empty_like(a)
    plan = deep_gemm.plan_gemm(deep_gemm.bf16_gemm_nt, a, b, d)
    rows = []
    for system, fn in (("call", lambda: deep_gemm.bf16_gemm_nt(a, b, d)), ("plan", plan)):
        samples = []
        for _ in range(20):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(50):
                fn()
            samples.append((time.perf_counter() - begin) / 50 * 1e3)
        rows.append(results.timing_row("host/bf16_gemm_nt", system, "host", timing.Timing.of(samples), notes=f"fastest {min(samples) * 1e3:.1f} us"))
        print(rows[-1]["case"], system, rows[-1]["notes"], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", choices=sorted(MODEL_SHAPES), default=list(MODEL_SHAPES))
    parser.add_argument("--part", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--calls", type=int, default=10, help="measured single calls of each system")
    parser.add_argument("--sustained-s", type=float, default=0.0, help="seconds back to back of each system; 0 = none")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if contests._quack() is None:
        print("QuACK is not installed here: not in this table")
    flush, rows = timing.L2Flush(), []
    for part in options.part:
        for contest in contests_of(part, options):
            rows += measure(contest, options, flush)
            del contest
            torch.cuda.empty_cache()
        if part == "small":
            rows += small_rows(options, flush)
        if part == "host":
            rows += host_rows()
        if options.json:
            results.merge(options.json, rows, key=("case", "system", "direction"))


if __name__ == "__main__":
    main()
