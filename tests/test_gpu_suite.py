"""The GPU suite, rehearsed on the CPU with tiny shapes: a broken test would otherwise show first on the machine that it is short of time on.
And its driver: tests that fail, die or hang are reported and do not stop the others; a limit is a limit."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


# A part of each file: all of them, at some length, is `pytest -m gpu --on-cpu tests/gpu`.
@pytest.mark.parametrize(
    "file,part",
    [
        ("test_mega_moe.py", "(routings or options) and EP1"),
        ("test_mega_moe_exact.py", "same_bits"),
        ("test_mega_moe_ep.py", "R2"),
        ("test_fused.py", "random_small_cases or different_numbers or in_turn"),
        ("test_fused_soak.py", "random_tokens or beside or neighbours"),
        ("test_gemm_tiles.py", "pp128 and (grouped-64 or no or True)"),
        ("test_gemm_gated.py", "(128 or 200) and (all or clamp) or windows"),
        ("test_gemm_gathered.py", "128 and random or 72 or gated"),
    ],
)
def test_rehearsal_passes(tmp_path, file, part):
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--on-cpu", f"--accuracy-dir={tmp_path}"]
    done = subprocess.run([*command, f"tests/gpu/{file}", "-k", part], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    if file not in ("test_mega_moe.py", "test_mega_moe_ep.py"):  # the others have no accuracy of Mega MoE
        return
    rows = json.loads((tmp_path / "mega-moe-accuracy-cpu.json").read_text())["rows"]
    assert {row["tensor"].split("[")[0] for row in rows} >= {"y", "dx", "dp", "dw13", "dw2"}
    assert any(row["torch_rel_frobenius"] for row in rows)


def test_stages_have_every_file_of_the_gemm_and_only_files_that_there_are(make_suite):
    module, suite = make_suite(30)
    named = {file for stage in module.stages(suite.out) for file in stage.tests}
    assert all((ROOT / file).is_file() for file in named)
    assert {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/gpu/test_gemm*.py")} <= named


def test_long_stages_run_only_when_they_are_named(make_suite, monkeypatch):
    module, suite = make_suite(30)
    monkeypatch.setattr(module.signal, "signal", lambda *arguments: None)
    known = {stage.name: stage for stage in module.stages(suite.out)}
    long = {name for name, stage in known.items() if stage.only_named}
    assert long == {f"soak-{name}" for name in ("routing", "neighbours", "cases", "routing-EP2", "neighbours-EP2")}
    for chosen, expected in (([], [name for name in known if name not in long]), (["--stage", "soak-cases"], ["soak-cases"])):
        ran = []
        monkeypatch.setattr(module.Suite, "run", lambda self, stage, ran=ran: ran.append(stage.name))
        monkeypatch.setattr(sys, "argv", ["gpu_suite.py", "--out", str(suite.out), *chosen])
        assert module.main() == 0 and ran == expected


TESTS = """
import os, time
import pytest

pytestmark = pytest.mark.gpu

def test_good(rehearsal, accuracy): accuracy.add('gemm', [{'case': 'a', 'tensor': 'd'}])
def test_dies(rehearsal): os._exit(1)
def test_fails(rehearsal): assert 1 == 2, "one is not two"
def test_hangs(rehearsal): time.sleep(60)
def test_last(rehearsal): pass
"""


@pytest.fixture
def make_suite(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_suite", ROOT / "scripts" / "gpu_suite.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_suite", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TEST_LIMIT_S", 3)
    monkeypatch.setenv("PYTEST_ADDOPTS", f"--on-cpu -c {ROOT / 'pyproject.toml'}")

    def make(budget_s: float):
        options = argparse.Namespace(out=tmp_path / "out", budget_s=budget_s, commit="abc", select=None)
        return module, module.Suite(options)

    return make


def test_suite_goes_on_behind_tests_that_die_or_hang(tmp_path, make_suite):
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "test_x.py").write_text(TESTS)
    module, suite = make_suite(140)
    suite.run(module.Stage("x", 100, tests=(str(tmp_path / "test_x.py"),)))
    outcome = suite.outcomes[0]
    assert (outcome.status, outcome.passed) == ("failed", 2)
    failures = dict(outcome.failures)
    assert failures.keys() == {"test_dies", "test_fails", "test_hangs"}
    assert "one is not two" in failures["test_fails"]
    assert json.loads((tmp_path / "out" / "gemm-accuracy-cpu.json").read_text())["rows"] == [{"case": "a", "tensor": "d"}]
    assert not list((tmp_path / "out").glob("*.rows"))
    table = suite.table().splitlines()
    assert table[2].startswith("FAILED x: ") and table[-1].split()[:4] == ["x", "failed", "2", "3"]


def test_stage_without_a_passed_test_is_a_failure(tmp_path, make_suite):
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "test_x.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_gpu_only(): pass\n")
    module, suite = make_suite(85)
    suite.run(module.Stage("x", 50, tests=(str(tmp_path / "test_x.py"),)))
    assert suite.outcomes[0].failures == [("x", "no test passed")] and not suite.all_well


def runs(stat: Path) -> bool:
    """Whether the process of this /proc file exists and is no zombie."""
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_limits_end_a_stage_with_all_that_it_started_and_skip_the_rest(tmp_path, make_suite):
    module, suite = make_suite(29)  # 25 of which are kept for the end
    code = f"import subprocess, time; p = subprocess.Popen(['sleep', '60']); open(r'{tmp_path}/pid', 'w').write(str(p.pid)); time.sleep(60)"
    begin = time.monotonic()
    suite.run(module.Stage("slow", 100, (sys.executable, "-c", code)))
    suite.run(module.Stage("later", 100, (sys.executable, "-c", "")))
    assert time.monotonic() - begin < 10
    assert [outcome.status for outcome in suite.outcomes] == ["timeout", "skipped"] and not suite.all_well
    child = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    while runs(child) and time.monotonic() - begin < 20:  # a killed process takes a moment to go
        time.sleep(0.05)
    assert not runs(child)
    assert json.loads((tmp_path / "out" / "suite.json").read_text())["stages"][0]["stage"] == "slow"
