"""Every table in README and docs is what scripts/tables.py makes from results/ now, and a changed result changes the table."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "scripts" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_show_what_the_results_files_hold():
    done = subprocess.run([sys.executable, "scripts/tables.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_changed_result_changes_the_table(tables, monkeypatch, tmp_path):
    rows = [
        {"case": "dense/c", "system": system, "direction": "gemm", "median_ms": ms, "sustained_ms": None, "tflops": 1.0}
        for system, ms in (("gemm", 2.0), ("torch", 3.0))
    ]
    made = {"commit": "abcdefgh", "date": "2026-12-01", "gpu": "G", "driver": "1", "torch": "2"}
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    text = "a\n<!-- table: gemm -->\nold\n<!-- /table -->\nb\n"
    (tmp_path / "results" / "gemm-h200.json").write_text(json.dumps({**made, "rows": rows}))
    assert "| dense/c | 2.000 | 1 | 1 | 1.50 | - |" in tables.filled(text) and "old" not in tables.filled(text)
    rows[1]["median_ms"] = 4.0
    (tmp_path / "results" / "gemm-h200.json").write_text(json.dumps({**made, "rows": rows}))
    assert "| 2.00 | - |" in tables.filled(text)
