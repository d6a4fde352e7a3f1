"""Measures every tile of deep_gemm.gemm_config.TILES for the grouped GEMMs of the model shapes and writes the table that the library reads.

    python scripts/bench/tune_gemm.py [--shape qwen3-30b ...] [--ep 2] [--tokens 16384] [--sustained-s 0.3] [--table deep_gemm/gemm_table.json]

Candidates run in random order, the L2 flushed before each single call; then each back to back for --sustained-s. The winner has the least
product of both times; every candidate's times go into the table, so that it also says what was tried.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
from collections.abc import Callable
from pathlib import Path

import gemm_contests as contests
import torch

from deep_gemm import gemm_config, gemm_launch, jit
from deep_gemm.testing import MODEL_SHAPES, results, timing

GATED = {"gemm1+swiglu": ("swiglu", "k", "gemm+swiglu"), "dgrad2+dswiglu": ("dswiglu", "mn", "gemm+dswiglu")}


def candidates(epilogue: str) -> list[gemm_config.Tile]:
    tiles = [tile for tile in gemm_config.TILES.values() if tile.block_n > 128]
    if epilogue != "store":
        tiles = [tile for tile in tiles if tile.pingpong]
    return tiles


def forced(tile: gemm_config.Tile, fn: Callable[[], object]) -> Callable[[], object]:
    """fn, whose launches take `tile`."""

    def choose(kind, a_major, b_major, d_dtype, m, n, k, num_sms, epilogue="store", gather="none"):
        return gemm_config.GemmConfig(kind, a_major, b_major, d_dtype, tile, epilogue, gather)

    def run() -> object:
        gemm_launch.choose_config = choose
        try:
            return fn()
        finally:
            gemm_launch.choose_config = gemm_config.choose_config

    return run


def times(systems: dict[str, Callable[[], object]], flush: timing.L2Flush, calls: int, seconds: float) -> dict[str, tuple[float, float]]:
    """(single, sustained) ms by name."""
    samples = {name: [] for name in systems}
    for round_ in range(calls + 1):
        for name in random.sample(list(systems), len(systems)):
            sample = timing.single(systems[name], warmups=0, calls=1, before=flush).median_ms
            if round_ > 0:
                samples[name].append(sample)
    held = {name: timing.sustained_ms(systems[name], seconds=seconds) for name in random.sample(list(systems), len(systems))}
    return {name: (timing.Timing.of(values).median_ms, held[name]) for name, values in samples.items()}


def tune(case: str, group: str, b_major: str, epilogue: str, size: int, n: int, fn: Callable[[], object], options, flush) -> dict:
    systems = {tile.name: forced(tile, fn) for tile in candidates(epilogue)}
    measured = times(systems, flush, options.calls, options.sustained_s)
    best = min(measured, key=lambda name: measured[name][0] * measured[name][1])
    print(f"{case:34} {best:12}", *(f"{name} {single:.3f}|{held:.3f}" for name, (single, held) in measured.items()), flush=True)
    tried = {name: {"single_ms": round(single, 4), "sustained_ms": round(held, 4)} for name, (single, held) in measured.items()}
    return {"group": group, "b_major": b_major, "epilogue": epilogue, "size": size, "n": n, "tile": best, "case": case, "tried": tried}


def tune_shape(name: str, options: argparse.Namespace, flush: timing.L2Flush) -> list[dict]:
    shape = MODEL_SHAPES[name]
    hidden, width = shape.hidden, shape.intermediate_hidden
    sizes = {  # group, b_major, the other size, n
        "gemm1": ("m", "k", hidden, 2 * width), "gemm2": ("m", "k", width, hidden), "dgrad2": ("m", "mn", hidden, width),
        "dgrad1": ("m", "mn", 2 * width, hidden), "wgrad1": ("k", "mn", 2 * width, hidden), "wgrad2": ("k", "mn", hidden, width),
    }  # fmt: skip
    rows = []
    for contest in contests.plain_layer(name, options.tokens, options.ep):
        group, b_major, size, n = sizes[contest.name.split("/")[1]]
        rows.append(tune(contest.name, group, b_major, "store", size, n, contest.systems["gemm"], options, flush))
        del contest
        torch.cuda.empty_cache()
    for contest in contests.fused_layer(name, options.tokens, options.ep):
        work = contest.name.split("/")[1]
        if work in GATED:
            epilogue, b_major, system = GATED[work]
            rows.append(tune(contest.name, "m", b_major, epilogue, hidden, width, contest.systems[system], options, flush))
        del contest
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", choices=sorted(MODEL_SHAPES), default=list(MODEL_SHAPES))
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--calls", type=int, default=5, help="measured single calls of each candidate")
    parser.add_argument("--sustained-s", type=float, default=0.3, help="seconds back to back of each candidate")
    parser.add_argument("--table", type=Path, default=gemm_config.TABLE)
    options = parser.parse_args()
    jit.warmup(every_candidate())
    flush, rows = timing.L2Flush(), []
    for name in options.shape:
        rows += tune_shape(name, options, flush)
    environment = {"gpu": torch.cuda.get_device_name(), "commit": results.commit(), "date": datetime.date.today().isoformat(), "torch": torch.__version__}
    options.table.write_text(json.dumps({**environment, "rows": rows}, indent=1) + "\n")
    print(f"{len(rows)} shapes written to {options.table}")


def every_candidate() -> list[jit.KernelSpec]:
    bf16 = torch.bfloat16
    problems = [("m_ends", "k", "k", "store"), ("m_ends", "k", "mn", "store"), ("k_ends", "mn", "mn", "store"), ("m_ends", "k", "k", "swiglu"),
                ("m_ends", "k", "mn", "dswiglu")]  # fmt: skip
    return [
        gemm_config.GemmConfig(kind, a, b, bf16, tile, epilogue).spec()
        for kind, a, b, epilogue in problems
        for tile in candidates(epilogue)
    ]


if __name__ == "__main__":
    main()
