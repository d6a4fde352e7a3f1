"""A trainer (tests/downstream/) takes the wheel that scripts/build_wheels makes from an index on loopback, with uv and with pip: locks it with
its hash, installs it into a clean environment, and trains on the CPU.

It trains under the Python of the tests, whose torch is at hand. For other Pythons torch would be a download of several GB, so there the wheel is
installed with all it needs but torch: it must load its extension, and say what is missing. Needs PyPI."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from index_helpers import build_index, installer_environment, locked, locked_from, run, serve
from jit_helpers import REPOSITORY
from release_helpers import release_files

from deep_gemm._version import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # the first test of a run builds the wheels
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
KEPT = {"sample-trainer", "deep-gemm", "cuda-bindings", "cuda-pathfinder"}  # of the lock file; the rest is torch and what torch brings
UV = (sys.executable, "-m", "uv")


@dataclass(frozen=True)
class Index:
    url: str
    asked: list[str]
    sha256: dict[str, str]  # by file name

    @property
    def wheel(self) -> str:
        """For this machine."""
        (name,) = [name for name in self.sha256 if name.endswith(f"_{os.uname().machine}.whl")]
        return name


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """The release files of this checkout in an index that is being served, beside nothing else."""
    folder = tmp_path_factory.mktemp("index")
    assert build_index().main([str(folder / "site"), str(release_files(tmp_path_factory))]) == 0
    files = [path for path in (folder / "site" / "pool").iterdir() if path.suffix != ".metadata"]
    with serve(folder / "site") as (url, asked):
        yield Index(url, asked, {path.name: build_index().sha256_of(path) for path in files})


@pytest.fixture(scope="module")
def trainer(index, tmp_path_factory) -> Path:
    """The sample project with the index's address filled in, locked by uv."""
    folder = tmp_path_factory.mktemp("trainer") / "project"
    shutil.copytree(REPOSITORY / "tests" / "downstream", folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt"):
        text = (folder / name).read_text()
        for placeholder, value in (("@INDEX@", index.url), ("@WHEEL@", index.wheel), ("@SHA256@", index.sha256[index.wheel])):
            text = text.replace(placeholder, value)
        (folder / name).write_text(text)
    run(*UV, "lock", "--python", sys.executable, cwd=folder, env=installer_environment(folder.parent))
    return folder


def sync(trainer: Path, environment: Path, python: str | Path, *options: str) -> None:
    """Installs what the lock file says, less torch and what comes with it."""
    names = re.findall(r'^name = "([^"]+)"', (trainer / "uv.lock").read_text(), re.MULTILINE)
    left_out = [word for name in names if name not in KEPT for word in ("--no-install-package", name)]
    env = installer_environment(trainer.parent, UV_PROJECT_ENVIRONMENT=str(environment))
    run(*UV, "sync", "--frozen", "--python", python, *options, *left_out, cwd=trainer, env=env)


def trained(environment: Path, trainer: Path) -> dict:
    """What train.py reports, run by the environment's Python where nothing of this checkout is in reach."""
    report = json.loads(run(environment / "bin" / "python", "-I", trainer / "train.py", cwd=trainer, env=installer_environment(trainer)))
    assert report["deep_gemm"] == __version__ and Path(report["file"]).is_relative_to(environment)
    return report


def test_uv_locks_address_and_hash_and_nothing_of_that_name_from_elsewhere(index, trainer):
    files = {f"{index.url}/pool/{name}": digest for name, digest in index.sha256.items()}
    assert locked(trainer / "uv.lock", "deep-gemm") == (f"{index.url}/simple/", files) and len(files) == 3, (
        "both architectures, and the source"
    )
    sources = locked_from(trainer / "uv.lock")
    assert [project for project, source in sources.items() if source.startswith(index.url)] == ["deep-gemm"]
    assert sources["torch"] != sources["deep-gemm"]


def test_trainer_trains_from_the_wheel_that_pip_and_then_uv_installed(index, trainer, tmp_path):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    pip = (environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    # The only step with the machine's own indexes: they may hold a build of torch for the CPU.
    run(*pip, f"torch=={torch.__version__.partition('+')[0]}", "numpy", cwd=tmp_path)
    index.asked.clear()
    run(*pip, "-r", trainer / "requirements.txt", cwd=tmp_path, env=installer_environment(tmp_path))
    assert f"/pool/{index.wheel}" in index.asked
    by_pip = trained(environment, trainer)
    run(environment / "bin" / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "deep_gemm", cwd=tmp_path)
    sync(trainer, environment, sys.executable, "--inexact")
    assert trained(environment, trainer)["losses"] == by_pip["losses"], "the same wheel"
    doctor = subprocess.run(
        [environment / "bin" / "deep-gemm", "doctor", "--json"], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    states = {line["name"]: line["state"] for line in json.loads(doctor.stdout)["lines"]}
    assert {states[name] for name in ("torch", "our headers", "extension", "installed as")} == {"OK"}


def interpreter(version: str) -> Path | None:
    """A Python of this version on PATH or of pyenv, whose stand-ins on PATH run only the version that is chosen there."""
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for candidate in [*([Path(on_path)] if on_path else []), *sorted(pyenv.glob(f"{version}.*/bin/python"))]:
        shown = subprocess.run([candidate, "-c", "import sys; print(sys.executable)"], check=False, capture_output=True, text=True)
        if shown.returncode == 0:
            return Path(shown.stdout.strip())
    return None


@pytest.mark.skipif(os.environ.get("DOWNSTREAM_TORCH") != "1", reason="DOWNSTREAM_TORCH=1 fetches a torch of several GB for each Python")
@pytest.mark.parametrize("version", PYTHONS)
def test_trainer_trains_on_every_python_with_a_torch_of_its_own(trainer, tmp_path, version):
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} on this machine")
    environment = tmp_path / "venv"
    run(found, "-m", "venv", environment, cwd=tmp_path)
    pip = (environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, f"torch=={torch.__version__.partition('+')[0]}", "numpy", cwd=tmp_path)
    run(*pip, "-r", trainer / "requirements.txt", cwd=tmp_path, env=installer_environment(tmp_path))
    losses = trained(environment, trainer)["losses"]
    assert losses[-1] < losses[0]
    shutil.rmtree(environment)  # several GB


@pytest.mark.parametrize("version", PYTHONS)
def test_wheel_installs_from_the_lock_file_on_every_python_and_names_missing_torch(trainer, tmp_path, version):
    env = installer_environment(tmp_path)
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} on this machine")
    sync(trainer, tmp_path / "venv", found)
    python = tmp_path / "venv" / "bin" / "python"
    code = (
        "import sys, deep_gemm\nfrom deep_gemm import _C\n"
        "assert _C.struct_fields('GemmParams')\n"
        "try:\n    deep_gemm.mega_moe\n"
        "except ModuleNotFoundError as error:\n    print(sys.version.split()[0], deep_gemm.__version__, error, sep='|')"
    )
    shown = run(python, "-I", "-c", code, cwd=tmp_path, env=env).strip().split("|")
    assert shown[0].startswith(f"{version}.") and shown[1:] == [
        __version__,
        "deep_gemm needs PyTorch, which is not installed: pip install 'torch>=2.9'",
    ]
    doctor = subprocess.run(
        [tmp_path / "venv" / "bin" / "deep-gemm", "doctor", "--json"], check=False, capture_output=True, text=True, env=env
    )
    assert doctor.returncode == 1, doctor.stderr
    failed = {line["name"] for line in json.loads(doctor.stdout)["lines"] if line["state"] == "FAIL"}
    assert failed == {"torch"}
