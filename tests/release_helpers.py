"""Release files of this checkout for slow tests, made once per test run, whatever the number of its processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest
from jit_helpers import REPOSITORY

BUILD_VENV = REPOSITORY / ".venv-build"


def build_wheels(out: Path, *options: object, umask: int = 0o022) -> None:
    """Runs scripts/build_wheels on the checkout as it is, committed or not."""
    command = [str(part) for part in (REPOSITORY / "scripts" / "build_wheels", "--allow-dirty", "--out", out, *options)]
    result = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=umask)
    assert result.returncode == 0, result.stdout


def release_files(factory: pytest.TempPathFactory) -> Path:
    """Folder with the source distribution and both wheels, as scripts/build_wheels leaves them."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "release"
    with open(shared / "release.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            build_wheels(folder)
            (folder / "complete").touch()
    return folder
