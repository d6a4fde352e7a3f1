"""The wheel, built from a clean copy of the source: one abi3 wheel for every Python >= 3.10 with all headers and licences.

It imports and compiles kernels where nothing of the checkout is in reach."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from jit_helpers import REPOSITORY

from deep_gemm._version import __version__

NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.so", "third_party", "results", "out")


def run(*command: object, cwd: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command], check=False, capture_output=True, text=True, cwd=cwd, env={**inherited, **environment}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source, out = tmp_path_factory.mktemp("source") / "deep_gemm", tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPOSITORY, source, ignore=NOT_SOURCE)
    stale = source / "build" / f"lib.linux-{os.uname().machine}-cpython-{sys.version_info.major}{sys.version_info.minor}" / "deep_gemm"
    stale.mkdir(parents=True)
    (stale / "removed_long_ago.py").touch()
    # Without isolation: the environment of the tests has the build's needs, and another download would cost half a minute.
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, source, cwd=out)
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel, cwd=target)
    return target


def test_wheel_is_one_abi3_wheel_for_python_3_10_and_later(wheel):
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("deep_gemm", __version__, "cp310", "abi3")
    assert platform == f"linux_{os.uname().machine}"


def test_wheel_holds_the_package_its_headers_and_their_licences_only(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"deep_gemm-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"deep_gemm", info}
    package = REPOSITORY / "deep_gemm"
    files = [path for path in package.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so")]
    expected = {path.relative_to(REPOSITORY).as_posix() for path in files}
    assert {name for name in names if name.startswith("deep_gemm/")} == expected | {"deep_gemm/_C.abi3.so"}
    assert f"{info}/licenses/LICENSE" in names
    assert {f"deep_gemm/include/third_party/{source}/LICENSE" for source in ("cutlass", "cccl")} <= names


def test_metadata_names_the_run_time_dependencies_and_extras(wheel):
    metadata = zipfile.ZipFile(wheel).read(f"deep_gemm-{__version__}.dist-info/METADATA").decode().split("\n\n")[0].splitlines()
    required = {line.split(": ")[1].replace(" ", "") for line in metadata if line.startswith("Requires-Dist") and "extra" not in line}
    assert required == {"torch>=2.9", "cuda-bindings<14,>=12.9"}
    assert {"Requires-Python: >=3.10", "Provides-Extra: demo", "Provides-Extra: test", "Provides-Extra: compiler"} <= set(metadata)


def test_extension_needs_nothing_but_libc(installed):
    dynamic = run("readelf", "--dynamic", installed / "deep_gemm" / "_C.abi3.so", cwd=installed)
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libpthread.so.0"}, needed


def test_installed_wheel_imports_and_knows_its_version(installed):
    script = "import deep_gemm; from deep_gemm import _C; print(deep_gemm.__version__, _C.__file__)"
    version, extension = run(sys.executable, "-c", script, cwd=installed, PYTHONPATH=str(installed)).split()
    assert version == __version__ and Path(extension).is_relative_to(installed)


def test_installed_wheel_compiles_its_kernels(installed, tmp_path):
    script = (
        "from deep_gemm import jit\n"
        "specs = list({spec.header: spec for spec in jit.shipped_specs('sm_90a')}.values())\n"
        "print(*sorted({jit.build(spec).origin for spec in specs}), len(specs))"
    )
    origins = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(installed), DG_CACHE_DIR=str(tmp_path)).split()
    assert origins[:-1] == ["compiled"] and int(origins[-1]) > 1


def test_quick_start_of_the_readme_runs(tmp_path):
    section = (REPOSITORY / "README.md").read_text().split("## Quick start\n")[1].split("\n## ")[0]
    blocks = section.split("```python\n")
    assert len(blocks) == 2
    on_cpu = "import torch\ntorch.cuda.is_available = lambda: False\n"
    check = "\nassert y.shape == (T, H) and dw13 is main_grad and dx.isfinite().all()"
    run(sys.executable, "-c", on_cpu + blocks[1].split("```")[0] + check, cwd=tmp_path, PYTHONPATH=str(REPOSITORY))
