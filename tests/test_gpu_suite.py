"""The GPU suite, rehearsed on the CPU with tiny shapes: a broken test would otherwise show first on the machine that it is short of time on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("selected", ["test_mega_moe.py -k (routings or options) and EP1 or bits", "test_mega_moe_ep.py"], ids=["one-rank", "processes"])
def test_rehearsal_passes_and_writes_accuracy(tmp_path, selected):
    file, *options = selected.split(" ", 2)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--on-cpu", f"--accuracy-dir={tmp_path}"]
    done = subprocess.run([*command, f"tests/gpu/{file}", *options], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    rows = json.loads((tmp_path / "mega-moe-accuracy-cpu.json").read_text())["rows"]
    assert {row["tensor"].split("[")[0] for row in rows} >= {"y", "dx", "dp", "dw13", "dw2"}
    assert any(row["torch_rel_frobenius"] for row in rows)
