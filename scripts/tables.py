"""Writes the tables of the documents from the files in results/, and what a layer costs in memory from the library, so that no number there is
typed by hand. Needs deep_gemm installed, or PYTHONPATH=. in the checkout.

    python scripts/tables.py [--check]

A document marks where a table goes, and this script replaces what stands between the marks:

    <!-- table: gemm --> ... <!-- /table -->

--check writes nothing and exits with 1 if a document differs from what would be written.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def read(name: str) -> dict:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def source(name: str, data: dict) -> str:
    machine = f"{data['gpu']}, driver {data['driver']}, torch {data['torch']}" if data.get("gpu") else f"CPU, torch {data['torch']}"
    return f"`results/{name}.json`: commit {data['commit'][:7]}, {data['date'][:10]}, {machine}."


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def pairs(data: dict, ours: str) -> list[tuple[dict, dict | None]]:
    """Our rows, each with the torch row that it competes with; a backward that recomputes competes with the one backward that torch has."""
    direction = {"bwd_recompute": "bwd"}
    torch = {(row["case"], row["direction"]): row for row in data["rows"] if row["system"] == "torch"}
    return [(r, torch.get((r["case"], direction.get(r["direction"], r["direction"])))) for r in data["rows"] if r["system"] == ours]


def ratio(ours: dict, theirs: dict | None, key: str) -> float | None:
    return theirs[key] / ours[key] if theirs and ours[key] and theirs[key] else None


def mega_moe() -> list[str]:
    data = read("mega-moe-h200")
    rows = [
        [
            ours["case"],
            ours["direction"],
            number(ours["median_ms"]),
            number(ours["sustained_ms"]),
            number(ours["tflops"], ".0f"),
            number(theirs and theirs["median_ms"]),
            number(theirs and theirs["sustained_ms"]),
            number(ratio(ours, theirs, "median_ms")) + "x",
            number(ratio(ours, theirs, "sustained_ms")) + "x",
        ]
        for ours, theirs in pairs(data, "staged")
    ]
    head = ["case", "direction", "ms", "sustained ms", "TFLOP/s", "torch path ms", "sustained", "over torch", "sustained"]
    return [source("mega-moe-h200", data), "", *markdown(head, rows)]


def work(case: str) -> str:
    """gemm1 of qwen3-30b/gemm1/EP2/bf16."""
    return (case.split("/") + [""])[1]


GEMM_GROUPS = {
    "dense": lambda case: case.startswith("dense/"),
    "grouped, forward and dgrad": lambda case: work(case) in ("gemm1", "gemm2", "dgrad1", "dgrad2") and "rows/" not in case,
    "grouped, wgrad, BF16 stored": lambda case: work(case) in ("wgrad1", "wgrad2") and case.endswith("/bf16"),
    "grouped, wgrad, FP32 accumulated (torch: BF16 stored)": lambda case: case.endswith("/fp32-accumulate"),
}


def gemm() -> list[str]:
    """Every case with a competitor, and the geometric mean and least ratio of each kind of work."""
    data = read("gemm-h200")
    rows, ratios = [], {name: [] for name in GEMM_GROUPS}
    for ours, theirs in pairs(data, "gemm"):
        group = next((name for name, holds in GEMM_GROUPS.items() if holds(ours["case"])), None)
        if theirs is None or group is None:
            continue
        single, held = ratio(ours, theirs, "median_ms"), ratio(ours, theirs, "sustained_ms")
        ratios[group].append((single, held))
        shown = [number(ours["median_ms"], ".3f"), number(ours["tflops"], ".0f"), number(theirs["tflops"], ".0f"), number(single), number(held)]
        rows.append([ours["case"], *shown])
    for name, group in ratios.items():
        columns = [column for column in zip(*group, strict=True) if all(column)]
        means = [f"{math.exp(sum(map(math.log, column)) / len(column)):.3f} (least {min(column):.2f})" for column in columns]
        if means:
            rows.append([f"*{name}: geometric mean*", "", "", "", *means, *[""] * (2 - len(means))])
    return [source("gemm-h200", data), "", *markdown(["case", "ms", "TFLOP/s", "torch TFLOP/s", "over torch", "sustained"], rows)]


def gemm_fused() -> list[str]:
    """The gated epilogues and gathered rows against what they replace or extend: the first system of their case."""
    data, first, rows = read("gemm-h200"), {}, []
    for row in data["rows"]:
        base = first.setdefault(row["case"], row)
        if base is row or row["system"] in ("torch", "quack"):
            continue
        cost = [number(row[key] / base[key] if row[key] and base[key] else None, ".3f") for key in ("median_ms", "sustained_ms")]
        rows.append([row["case"], row["system"], number(row["median_ms"], ".3f"), base["system"], number(base["median_ms"], ".3f"), *cost])
    head = ["case", "system", "ms", "against", "ms", "ratio of times", "sustained"]
    return [source("gemm-h200", data), "", *markdown(head, [row for row in rows if not row[0].startswith("host/")])]


def gemm_small() -> list[str]:
    """What is limited by memory or by the host."""
    data = read("gemm-h200")
    rows = [
        [row["case"], row["system"], number(row["median_ms"] * 1e3, ".1f"), row["notes"]]
        for row in data["rows"]
        if "rows/" in row["case"] or row["case"].startswith("host/")
    ]
    return [source("gemm-h200", data), "", *markdown(["case", "system", "us", "notes"], rows)]


def gemm_tiles() -> list[str]:
    """Every candidate of the autotuner: single | sustained ms, the winner in bold."""
    data = json.loads((ROOT / "deep_gemm" / "gemm_table.json").read_text())
    tiles = list(dict.fromkeys(tile for row in data["rows"] for tile in row["tried"]))
    rows = []
    for row in data["rows"]:
        cells = []
        for tile in tiles:
            tried = row["tried"].get(tile)
            text = "-" if tried is None else f"{tried['single_ms']:.3f} / {tried['sustained_ms']:.3f}"
            cells.append(f"**{text}**" if tile == row["tile"] else text)
        rows.append([row["case"], *cells])
    where = f"`deep_gemm/gemm_table.json`: commit {data['commit'][:7]}, {data['date']}, {data['gpu']}, torch {data['torch']}; single / sustained ms."
    return [where, "", *markdown(["case", *tiles], rows)]


def accuracy() -> list[str]:
    data = read("mega-moe-accuracy-h200")
    worst: dict[str, tuple[float, float, float]] = {}
    for row in data["rows"]:
        if row["torch_rel_frobenius"]:
            mine, torch = row["rel_frobenius"], row["torch_rel_frobenius"]
            old = worst.get(row["tensor"], (0.0, 0.0, 0.0))
            worst[row["tensor"]] = (max(old[0], mine), max(old[1], torch), max(old[2], mine / torch))
    rows = [[tensor, f"{a:.2e}", f"{b:.2e}", f"{c:.3f}"] for tensor, (a, b, c) in worst.items()]
    head = ["tensor", "largest relative Frobenius error", "the torch path's largest", "largest ratio in one case"]
    return [source("mega-moe-accuracy-h200", data), "", *markdown(head, rows)]


def suite() -> list[str]:
    data = read("gpu-suite-h200")
    rows = [
        [stage["stage"], stage["status"], str(stage["passed"]), str(len(stage["failures"])), str(stage["skipped"])]
        for stage in data["stages"]
        if stage["passed"] or stage["failures"]
    ]
    where = f"`results/gpu-suite-h200.json`: commit {(data['commit'] or 'unknown')[:7]}, {data['date'][:10]}, {data['machine']}."
    return [where, "", *markdown(["stage", "status", "passed", "failed", "skipped"], rows)]


def demo() -> list[str]:
    data = read("demo-h200")
    text = f"held-out loss {data['heldout_before']:.3f} -> {data['heldout_after']:.3f} nats/byte in {len(data['train_loss'])} steps"
    return [source("demo-h200", data), "", f"{text}, {data['seconds']:.0f} s; gradients against autograd: relative error {data['gradient_error']:.1e}."]


def first_call() -> list[str]:
    data = read("first-call-h200")
    rows = [[row["case"], row["system"], *(number(row[key], ".0f") for key in ("median_ms", "p10_ms", "p90_ms")), row["notes"]] for row in data["rows"]]
    return [source("first-call-h200", data), "", *markdown(["case", "system", "ms", "fastest", "slowest", "parts"], rows)]


MEMORY_TOKENS, MEMORY_RANKS = 16384, (1, 8)


def memory() -> list[str]:
    """Computed, not measured: tests compare `mega_moe_plan_bytes` with what is allocated."""
    from deep_gemm import mega_moe_plan_bytes
    from deep_gemm.testing import MODEL_SHAPES

    rows = []
    for name, shape in MODEL_SHAPES.items():
        sizes = (shape.num_experts, MEMORY_TOKENS, shape.num_topk, shape.hidden, shape.intermediate_hidden)
        for num_ranks in MEMORY_RANKS:
            plan = mega_moe_plan_bytes(num_ranks, *sizes, save="preact")
            kept = mega_moe_plan_bytes(num_ranks, *sizes, save="recompute").saved
            gib = [number(value / 2**30) for value in (plan.symmetric, plan.scratch, plan.saved, kept)]
            rows.append([name, str(num_ranks), *gib])
    return markdown(["shape", "R", "symmetric", "scratch", 'saved, `"preact"`', '`"recompute"`'], rows)


TABLES: dict[str, Callable[[], list[str]]] = {
    "mega-moe": mega_moe,
    "gemm": gemm,
    "gemm-fused": gemm_fused,
    "gemm-small": gemm_small,
    "gemm-tiles": gemm_tiles,
    "accuracy": accuracy,
    "suite": suite,
    "demo": demo,
    "first-call": first_call,
    "memory": memory,
}


def filled(text: str) -> str:
    return MARKED.sub(lambda match: match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a document is out of date")
    options = parser.parse_args()
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        old = path.read_text()
        new = filled(old)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(new)
    print(("out of date: " if options.check else "written: ") + (", ".join(stale) or "none"))
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
