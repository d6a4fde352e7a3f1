"""The GPU suite: device, accuracy collector, and a rehearsal without a GPU.

`pytest -m gpu` needs an NVIDIA GPU. `--on-cpu` runs the tests that can with tiny shapes and the reference backend, so that the tests
themselves are known to be right; there the R ranks of a case are one rank with the tokens and experts of all.
`--accuracy-dir DIR` is where every case's error goes: mega-moe-accuracy-<gpu>.json and gemm-accuracy-<gpu>.json.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

# Virtual ranks need a hardware queue each, which the context takes when it is made; so before anything touches CUDA.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import pytest
import torch

from deep_gemm.testing import results


def pytest_addoption(parser):
    parser.addoption("--on-cpu", action="store_true", help="rehearse the GPU suite on the CPU: tiny shapes, reference backend")
    parser.addoption("--accuracy-dir", type=Path, default=None, help="folder of the accuracy results (default: not written)")


def _on_cpu(config) -> bool:
    return config.getoption("--on-cpu")


def pytest_collection_modifyitems(config, items):
    missing = None if torch.cuda.is_available() else "no NVIDIA GPU: torch.cuda.is_available() is False"
    for item in items:
        if "gpu" not in item.keywords:
            continue
        if _on_cpu(config):
            if "rehearsal" not in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason="--on-cpu: this test is about the GPU"))
        elif missing:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def rehearsal(request) -> bool:
    """Whether this is a rehearsal on the CPU. A test that uses it (or `device`) runs in one."""
    return _on_cpu(request.config)


@pytest.fixture(scope="session")
def device(rehearsal) -> torch.device:
    if rehearsal:
        return torch.device("cpu")
    # The oracle's FP32 matmuls are the truth, so they must not be TF32.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda", torch.cuda.current_device())


class Accuracy:
    """Rows of all tests of the session, by results file."""

    def __init__(self):
        self.rows: dict[str, list[dict]] = defaultdict(list)

    def add(self, subject: str, rows: list[dict]) -> None:
        """subject: "mega-moe" or "gemm"."""
        self.rows[f"{subject}-accuracy"] += rows

    def save(self, folder: Path) -> None:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        suffix = "h200" if "H200" in name else name.lower().replace(" ", "-")
        for subject, rows in self.rows.items():
            results.merge(folder / f"{subject}-{suffix}.json", rows, key=("case", "tensor"))


@pytest.fixture(scope="session")
def accuracy(request):
    collector = Accuracy()
    yield collector
    if folder := request.config.getoption("--accuracy-dir"):
        collector.save(folder)
