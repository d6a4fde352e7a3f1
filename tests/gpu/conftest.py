"""The GPU suite: device, accuracy collector, and a rehearsal without a GPU.

`pytest -m gpu` needs an NVIDIA GPU. `--on-cpu` runs the tests that can with tiny shapes and the reference backend, so that the tests
themselves are known to be right; there the R ranks of a case are one rank with the tokens and experts of all.
`--accuracy-dir DIR` is where every case's error goes: mega-moe-accuracy-<gpu>.json and gemm-accuracy-<gpu>.json.
`--journal FILE` notes each test's start and outcome, skips tests that are in it already, and ends the session when the CUDA context is
lost, since every later test would fail too: `scripts/gpu_suite.py` goes on in a new process.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

# Virtual ranks need a hardware queue each, which the context takes when it is made; so before anything touches CUDA.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import pytest
import torch

from deep_gemm.testing import numeric, results


def pytest_addoption(parser):
    parser.addoption("--on-cpu", action="store_true", help="rehearse the GPU suite on the CPU: tiny shapes, reference backend")
    parser.addoption("--accuracy-dir", type=Path, default=None, help="folder of the accuracy results (default: not written)")
    parser.addoption("--journal", type=Path, default=None, help="file of tests begun and done; tests in it are not run again")


def _on_cpu(config) -> bool:
    return config.getoption("--on-cpu", default=False)


class Journal:
    """Lines of JSON: {"test", "begin": true}, {"test", "outcome", "seconds", "text"}, and {"end": true} when all tests were run."""

    def __init__(self, path: Path):
        self.path = path
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.known = {entry["test"] for entry in entries if "test" in entry}

    def write(self, **entry) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def pytest_collection_modifyitems(self, config, items):
        done = [item for item in items if item.nodeid in self.known]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in self.known]

    def pytest_runtest_logstart(self, nodeid):
        self.write(test=nodeid, begin=True)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report.longrepr, "reprcrash", report.longrepr)
            self.write(test=report.nodeid, outcome=report.outcome, seconds=report.duration, text="" if text is None else str(text)[:2000])

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item):
        if torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                pytest.exit(f"the CUDA context is lost after {item.nodeid}: {error}", returncode=3)

    def pytest_sessionfinish(self, exitstatus):
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            self.write(end=True)


def pytest_configure(config):
    if path := config.getoption("--journal", default=None):
        config.pluginmanager.register(Journal(path), "journal")


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
    """Rows of all tests, by results file. They go to disk at once: a session may be killed, and the next one goes on with its rows."""

    def __init__(self, folder: Path | None):
        self.folder = folder

    def add(self, subject: str, rows: list[dict]) -> None:
        """subject: "mega-moe" or "gemm"."""
        if self.folder is not None:
            results.append_rows(self.folder / f"{subject}-accuracy.rows", rows)


@pytest.fixture(scope="session")
def accuracy(request):
    collector = Accuracy(request.config.getoption("--accuracy-dir", default=None))
    yield collector
    if collector.folder is not None:
        results.collect_rows(collector.folder)


@pytest.fixture
def check(accuracy, request):
    """check(actual, truth): a GEMM's result is within the bounds of its dtype; the error goes to the results."""
    import gemm_support

    torch.backends.cuda.matmul.allow_tf32 = False
    count = 0

    def compare(actual: torch.Tensor, truth: torch.Tensor) -> None:
        nonlocal count
        name = f"{request.node.name}" + (f"#{count}" if count else "")
        count += 1
        errors = numeric.measure_errors(actual, truth)
        accuracy.add("gemm", [results.accuracy_row(name, "d", errors, None)])
        numeric.check_errors(errors, name=name, **gemm_support.BOUNDS[actual.dtype])

    return compare


@pytest.fixture
def launches(rehearsal):
    """The module with launch_m_grouped and the others: the kernels, or torch in a rehearsal."""
    if rehearsal:
        import torch_gemm

        return torch_gemm
    from deep_gemm import gemm_launch

    return gemm_launch


@pytest.fixture
def force_tile(monkeypatch, rehearsal):
    """force_tile(name): every launch of the test takes that tile."""
    import gemm_support

    from deep_gemm import gemm_launch

    forced = []

    def force(name: str):
        forced.append(gemm_support.ForcedTile(name))
        monkeypatch.setattr(gemm_launch, "choose_config", forced[-1])
        return forced[-1].tile

    yield force
    assert rehearsal or all(choice.chosen for choice in forced), "no launch asked for the tile"


@pytest.fixture
def make_ranks(device, rehearsal):
    """make_ranks(case) -> Ranks of it. Symmetric memory and scratch are freed when the test is over."""
    import moe_support

    made = []

    def make(case):
        made.append(moe_support.make(case, device, rehearsal))
        return made[-1]

    yield make
    for ranks in made:
        for buffer in ranks.buffers:
            buffer.destroy()
    made.clear()
    gc.collect()
