"""What the JIT tests and the processes that they start share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from deep_gemm.jit import KernelSpec

REPOSITORY = Path(__file__).resolve().parent.parent


def echo_spec(mark: int = 7, arch: str = "sm_90a", **overrides) -> KernelSpec:
    """The smallest kernel of the package (0.05 s to compile); `mark` makes different keys."""
    arguments = {
        "name": "echo_params",
        "header": "deep_gemm/kernels/echo_params.cuh",
        "entry": "deep_gemm::kernels::echo_params",
        "params": "ExampleParams",
        "config": {"kMark": mark},
        "threads": 32,
        "arch": arch,
    }
    return KernelSpec(**{**arguments, **overrides})


def start(script: str, cache: Path, root: Path = REPOSITORY) -> subprocess.Popen[str]:
    """A Python process that runs `script` with the package of `root` and this cache folder."""
    path = os.pathsep.join((str(root), str(REPOSITORY / "tests")))
    environment = {**os.environ, "PYTHONPATH": path, "DG_CACHE_DIR": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root
    )


def run(script: str, cache: Path, root: Path = REPOSITORY) -> str:
    """Standard output of such a process; fails with its standard error."""
    process = start(script, cache, root)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()
