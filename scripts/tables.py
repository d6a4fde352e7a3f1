"""Writes the tables of the documents from the files in results/, so that no number there is typed by hand.

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


def gemm() -> list[str]:
    data = read("gemm-h200")
    rows, ratios = [], []
    for ours, theirs in pairs(data, "gemm"):
        single, held = ratio(ours, theirs, "median_ms"), ratio(ours, theirs, "sustained_ms")
        ratios.append((single, held))
        rows.append(
            [
                ours["case"],
                number(ours["median_ms"], ".3f"),
                number(ours["tflops"], ".0f"),
                number(theirs["tflops"], ".0f"),
                number(single),
                number(held),
            ]
        )
    means = [math.exp(sum(math.log(r) for r in column) / len(column)) if all(column) else None for column in zip(*ratios, strict=True)]
    rows.append(["geometric mean", "", "", "", *(number(mean, ".3f") for mean in means)])
    return [source("gemm-h200", data), "", *markdown(["case", "ms", "TFLOP/s", "torch TFLOP/s", "over torch", "sustained"], rows)]


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


TABLES: dict[str, Callable[[], list[str]]] = {"mega-moe": mega_moe, "gemm": gemm, "accuracy": accuracy, "suite": suite, "demo": demo, "first-call": first_call}


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
