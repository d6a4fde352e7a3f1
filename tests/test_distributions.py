"""Two distributions that own the folder `deep_gemm` are named at import, cheaply; and an installation without torch says so."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from jit_helpers import REPOSITORY

from deep_gemm import distributions
from deep_gemm._version import __version__


@pytest.fixture
def site(tmp_path) -> Path:
    """A site-packages with the package's top level."""
    (tmp_path / "deep_gemm").mkdir()
    for path in (REPOSITORY / "deep_gemm").glob("*.py"):
        shutil.copy(path, tmp_path / "deep_gemm")
    return tmp_path


def add(site: Path, info: str, record: str = "deep_gemm/__init__.py,,\n") -> None:
    (site / info).mkdir()
    (site / info / "RECORD").write_text(record)


def run(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    # -S: nothing of this interpreter's own packages, torch above all.
    command = [sys.executable, "-S", "-c", code]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=site, env={**os.environ, "PYTHONPATH": str(site)})


def test_two_owners_are_named_once_with_the_remedy_at_the_importing_line(site):
    add(site, "deep_gemm-3.0.0.dist-info")
    add(site, "sgl_deep_gemm-0.2.5.dist-info")
    (site / "trainer.py").write_text("\nimport deep_gemm\n")
    shown = run(site, "import trainer, deep_gemm, importlib; importlib.import_module('deep_gemm.errors')").stderr
    assert shown.count("RuntimeWarning") == 1
    assert "trainer.py:2: RuntimeWarning: deep-gemm 3.0.0 and sgl-deep-gemm 0.2.5 all install the package `deep_gemm`" in shown
    assert "pip uninstall deep-gemm sgl-deep-gemm, then install" in shown


@pytest.mark.parametrize("second", [None, ("deep_gemm_recipes-1.0.dist-info", "deep_gemm_recipes/__init__.py,,\n")])
def test_one_owner_is_silent(site, second):
    add(site, "deep_gemm-3.0.0.dist-info")
    if second:
        add(site, *second)
    result = run(site, "import deep_gemm")
    assert (result.returncode, result.stderr) == (0, "")


def test_owners_of_any_name_are_found_on_request(site):
    add(site, "serving_kernels-1.2.dist-info")
    (site / "editable-1.0.dist-info").mkdir()
    (site / "editable-1.0.dist-info" / "top_level.txt").write_text("deep_gemm\n")
    assert distributions.owners(site) == []
    assert [str(owner) for owner in distributions.owners_on_path([str(site), str(site)])] == ["editable 1.0", "serving-kernels 1.2"]


def test_folder_that_cannot_be_read_has_no_owners(tmp_path):
    assert distributions.owners(tmp_path / "absent") == []


def test_check_costs_less_than_2_ms_among_500_distributions(site):
    for number in range(500):
        (site / f"package_{number}-1.0.dist-info").mkdir()
    add(site, "deep_gemm-3.0.0.dist-info")
    code = "import time, deep_gemm; t = time.perf_counter(); deep_gemm._warn_if_shared(); print(time.perf_counter() - t)"
    seconds = statistics.median(float(run(site, code).stdout) for _ in range(5))
    assert seconds < 2e-3


def test_without_torch_the_package_imports_and_a_function_says_what_is_missing(site):
    shutil.copytree(REPOSITORY / "deep_gemm" / "mega", site / "deep_gemm" / "mega")
    result = run(site, "import deep_gemm; print(deep_gemm.__version__); deep_gemm.mega_moe")
    assert result.stdout.strip() == __version__
    assert result.stderr.strip().endswith("ModuleNotFoundError: deep_gemm needs PyTorch, which is not installed: pip install 'torch>=2.9'")
