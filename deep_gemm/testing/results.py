"""results/<name>.json: rows of measurements with the environment that they came from (format: docs/design.md, "Results files")."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def _output(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def commit() -> str:
    """Commit of the source tree, with `-dirty` if it has changes; `SOURCE_COMMIT` where the tree travels without its history."""
    if given := os.environ.get("SOURCE_COMMIT"):
        return given
    head = _output(["git", "rev-parse", "HEAD"])
    if head is None:
        return "unknown"
    return head + ("-dirty" if _output(["git", "status", "--porcelain", "--untracked-files=no"]) else "")


def _nvidia_smi(device: int) -> dict[str, str]:
    fields = ["driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu"]
    text = _output(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={device}"])
    return dict(zip(fields, (value.strip() for value in text.split(",")))) if text else {}


def environment(command: str | None = None, num_gpus: int | None = None) -> dict[str, Any]:
    """Everything of a results file but its rows. Only queries; no clock or mode is set."""
    has_gpu = torch.cuda.is_available()
    smi = _nvidia_smi(torch.cuda.current_device()) if has_gpu else {}
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command or shlex.join([Path(sys.executable).name, *sys.argv]),
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "num_gpus": (1 if num_gpus is None else num_gpus) if has_gpu else 0,
        "driver": smi.pop("driver_version", None),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "clocks": smi or None,
    }


def timing_row(case: str, system: str, direction: str, timing: Any, *, flops: float | None = None, notes: str = "") -> dict[str, Any]:
    """`timing`: a `timing.Timing`. flops: credited for one call (6*M*H*I forward, 12*M*H*I backward), None = no tflops."""
    return {
        "case": case,
        "system": system,
        "direction": direction,
        "median_ms": timing.median_ms,
        "p10_ms": timing.p10_ms,
        "p90_ms": timing.p90_ms,
        "sustained_ms": timing.sustained_ms,
        "tflops": None if flops is None else flops / timing.median_ms / 1e9,
        "notes": notes,
    }


def accuracy_row(case: str, tensor: str, errors: Any, torch_rel_frobenius: float | None) -> dict[str, Any]:
    """`errors`: a `numeric.Errors`."""
    return {
        "case": case,
        "tensor": tensor,
        "rel_frobenius": errors.rel_frobenius,
        "diff": errors.diff,
        "max_row_rel": errors.max_row_rel,
        "torch_rel_frobenius": torch_rel_frobenius,
    }


def write(path: str | os.PathLike, rows: Iterable[dict[str, Any]], *, env: dict[str, Any] | None = None) -> None:
    """Write the whole file, atomically: a reader sees the old one or the new one, and a killed writer leaves no half."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps({**(env or environment()), "rows": list(rows)}, indent=1, allow_nan=True) + "\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def merge(path: str | os.PathLike, rows: Iterable[dict[str, Any]], *, key: tuple[str, ...], env: dict[str, Any] | None = None) -> None:
    """`write`, keeping rows of an existing file of the same commit and GPU whose `key` fields are not among the new rows'."""
    env, rows = env or environment(), list(rows)
    kept = []
    if Path(path).exists():
        old = json.loads(Path(path).read_text())
        if all(old.get(field) == env[field] for field in ("commit", "gpu")):
            new_keys = {tuple(row[field] for field in key) for row in rows}
            kept = [row for row in old["rows"] if tuple(row[field] for field in key) not in new_keys]
    write(path, kept + rows, env=env)


def append_rows(path: str | os.PathLike, rows: Iterable[dict[str, Any]]) -> None:
    """Rows of a run that may be killed, as lines of JSON; `collect_rows` makes the results file of them."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def collect_rows(folder: str | os.PathLike, *, key: tuple[str, ...] = ("case", "tensor")) -> None:
    """Merge every <name>.rows of the folder into <name>-<gpu>.json and remove it."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    suffix = "h200" if "H200" in gpu else gpu.lower().replace(" ", "-")
    for path in Path(folder).glob("*.rows"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        merge(path.with_name(f"{path.stem}-{suffix}.json"), rows, key=key)
        path.unlink()
