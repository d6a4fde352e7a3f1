"""All that is run on a GPU machine, in stages with time limits: environment, kernels compiled, GPU tests, demo, benchmarks.

    python scripts/gpu_suite.py --out DIR [--stage gemm mega-moe ...] [--budget-s 540] [--commit SHA] [--select EXPRESSION]

Needs torch with CUDA, pytest and a built checkout; deep_gemm need not be installed. Every stage is a process group of its own that is killed at
its limit, and a stage that loses the CUDA context or hangs in a test goes on in a new process behind that test: the suite itself
never hangs, and prints its table last, failures first. DIR then holds suite.log (all output), suite.json (all outcomes) and the results
files that the stages made. Exit status 0 if nothing failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEST_LIMIT_S = 60  # one test; a kernel that hangs ends with its process
MAX_RESTARTS = 8
COLLECT_S = 20  # to put accuracy rows of a killed session into their file
RESERVE_S = 25  # for that and the table

ENVIRONMENT = """
import json, os, shutil, torch
from deep_gemm import jit
from deep_gemm.testing import results
print(json.dumps(results.environment(num_gpus=torch.cuda.device_count()), indent=1))
print(json.dumps(jit.status(), indent=1))
print("cpus", os.cpu_count(), "gcc", shutil.which("gcc"), "memory", torch.cuda.mem_get_info())
print(torch.ones(8, device="cuda").sum().item())
"""
WARMUP = """
import sys
from deep_gemm import jit
report = jit.warmup(jit.shipped_specs(jit.device_arch(0)), progress=True)
print(report)
sys.exit(bool(report.failures))
"""


@dataclass(frozen=True)
class Stage:
    """A command or test files. limit_s: at most so long, less where the budget ends sooner. only_named: not among those that are run by default."""

    name: str
    limit_s: float
    command: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    only_named: bool = False


@dataclass
class Outcome:
    """status: ok, failed, timeout (killed at its limit), skipped (no budget left). failures: (what, first lines)."""

    stage: str
    status: str
    seconds: float = 0.0
    passed: int = 0
    skipped: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def sanitizer_stages(python: str) -> list[Stage]:
    """compute-sanitizer over a small program, R = 1 and 2, both CUDA backends. API errors are no finding: cuda-bindings looks up functions that the
    driver lacks."""
    tool = ("compute-sanitizer", "--report-api-errors", "no", "--error-exitcode", "9", "--tool")
    case = str(ROOT / "tests" / "gpu" / "sanitizer_case.py")
    return [
        Stage(f"{name}{'-fused' if backend == 'fused' else ''}-R{ranks}", 90, (*tool, name, python, case, str(ranks), backend))
        for name in ("memcheck", "racecheck", "synccheck")
        for backend in ("cuda", "fused")
        for ranks in (1, 2)
        if shutil.which("compute-sanitizer")
    ]


def long_stages(python: str, out: Path) -> list[Stage]:
    """Five minutes each of random steps with the fused forward, and 2000 random small cases. The processes need two GPUs."""
    soak, path = (python, str(ROOT / "tests" / "gpu" / "soak.py")), ("--json", str(out / "fused-soak-h200.json"))
    runs = {
        "soak-routing": ("routing",),
        "soak-neighbours": ("neighbours",),
        "soak-cases": ("cases", "--count", "2000", "--seconds", "480"),
        "soak-routing-EP2": ("routing", "--processes"),
        "soak-neighbours-EP2": ("neighbours", "--processes"),
    }
    return [Stage(name, 510, (*soak, *arguments, *path), only_named=True) for name, arguments in runs.items()]


def stages(out: Path) -> list[Stage]:
    python, bench = sys.executable, ROOT / "scripts" / "bench"
    moe = [
        Stage(f"bench-{shape}", 90, (python, str(bench / "mega_moe.py"), "--shape", shape, "--sustained-s", "3", "--json", str(out / "mega-moe-h200.json")))
        for shape in ("qwen3-30b", "qwen3-235b", "deepseek-v3")
    ]
    return [
        Stage("environment", 60, (python, "-c", ENVIRONMENT)),
        Stage("warmup", 240, (python, "-c", WARMUP)),
        Stage("launch", 90, tests=("tests/gpu/test_launch.py",)),
        Stage("gemm", 180, tests=("tests/gpu/test_gemm.py",)),
        Stage("gemm-variants", 150, tests=tuple(f"tests/gpu/test_gemm_{part}.py" for part in ("tiles", "gated", "gathered"))),
        Stage("staged-kernels", 120, tests=("tests/gpu/test_staged_kernels.py",)),
        Stage("mega-moe", 240, tests=("tests/gpu/test_mega_moe.py",)),
        Stage("fused", 150, tests=("tests/gpu/test_fused.py",)),
        Stage("fused-soak", 150, tests=("tests/gpu/test_fused_soak.py",)),
        Stage("memory", 60, tests=("tests/gpu/test_memory.py",)),
        Stage("mega-moe-exact", 180, tests=("tests/gpu/test_mega_moe_exact.py",)),
        Stage("bad-input", 120, tests=("tests/gpu/test_bad_input.py",)),
        Stage("processes", 280, tests=("tests/gpu/test_mega_moe_ep.py",)),
        *sanitizer_stages(python),
        Stage("demo", 120, (python, "-m", "deep_gemm.demo", "--device", "cuda", "--out", str(out))),
        Stage("bench-gemm", 120, (python, str(bench / "gemm.py"), "--sustained-s", "1.5", "--json", str(out / "gemm-h200.json"))),
        *moe,
        *long_stages(python, out),
    ]


def machine() -> str | None:
    """GPU and driver, by nvidia-smi: this process keeps out of CUDA."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return None


class Suite:
    def __init__(self, options: argparse.Namespace):
        self.out: Path = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + options.budget_s - RESERVE_S
        self.select = options.select
        self.outcomes: list[Outcome] = []
        self.machine = machine()
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
            "DG_TIMEOUT_S": os.environ.get("DG_TIMEOUT_S", "15"),
        }
        if options.commit:
            self.environment["SOURCE_COMMIT"] = options.commit

    def run(self, stage: Stage) -> None:
        outcome, begin = Outcome(stage.name, "ok"), time.monotonic()
        self.outcomes.append(outcome)
        limit = min(begin + stage.limit_s, self.deadline)
        if limit - begin < 1:
            outcome.status = "skipped"
            return
        print(f"== {stage.name} (at most {limit - begin:.0f} s)", flush=True)
        if stage.tests:
            self._run_tests(stage, outcome, limit)
        else:
            self._run_command(stage, outcome, limit)
        outcome.seconds = time.monotonic() - begin
        print(f"   {outcome.status}, {outcome.passed} passed, {len(outcome.failures)} failed, {outcome.seconds:.0f} s", flush=True)
        self._save()

    def _run_command(self, stage: Stage, outcome: Outcome, limit: float) -> None:
        code, text = self._process(stage, list(stage.command), limit)
        outcome.notes += [line for line in text.splitlines() if "TFLOP/s" in line or line.startswith(("held-out", "MoE gradients")) or " steps in " in line]
        if code is None:
            outcome.status = "timeout"
        elif code:
            outcome.status = "failed"
        if code != 0:
            last = [line for line in text.splitlines() if line.strip()][-4:]
            outcome.failures.append((f"exit status {code}", "\n".join(last)))

    def _run_tests(self, stage: Stage, outcome: Outcome, limit: float) -> None:
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder, "journal")
            command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "--tb=short", "-rfE"]
            command += [f"--timeout={TEST_LIMIT_S}", "--timeout-method=thread", f"--journal={journal}", f"--accuracy-dir={self.out}"]
            command += [*(["-k", self.select] if self.select else []), *stage.tests]
            known = -1
            for _ in range(MAX_RESTARTS):
                code, text = self._process(stage, command, limit)
                entries = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
                ended = bool(entries) and entries[-1].get("end", False)
                if code is None:
                    outcome.status = "timeout"
                if ended or code is None or len(entries) == known:
                    break
                known = len(entries)
            self._read(entries, outcome)
            if any(self.out.glob("*.rows")):  # a session that was killed has not done it
                collect = f"from deep_gemm.testing import results; results.collect_rows({str(self.out)!r})"
                self._process(stage, [sys.executable, "-c", collect], time.monotonic() + COLLECT_S)
            if not ended and code is not None:
                tail = "\n".join(text.splitlines()[-6:])
                outcome.failures.append((stage.name, f"pytest ended with status {code} before all tests were run:\n{tail}"))
        if not outcome.passed:
            outcome.failures.append((stage.name, "no test passed"))
        if outcome.failures and outcome.status == "ok":
            outcome.status = "failed"

    def _read(self, entries: list[dict], outcome: Outcome) -> None:
        open_tests: dict[str, None] = {}
        for entry in entries:
            name = entry.get("test", "").split("::", 1)[-1]
            if entry.get("begin"):
                open_tests[name] = None
            elif "outcome" in entry:
                open_tests.pop(name, None)
                outcome.passed += entry["outcome"] == "passed"
                outcome.skipped += entry["outcome"] == "skipped"
                if entry["outcome"] == "failed":
                    outcome.failures.append((name, entry["text"]))
                elif entry["outcome"] == "skipped" and entry["text"] not in outcome.notes:
                    outcome.notes.append(entry["text"])
        outcome.failures += [(name, "did not end: the process was killed or died in it (see suite.log)") for name in open_tests]

    def _process(self, stage: Stage, command: list[str], limit: float) -> tuple[int | None, str]:
        """(exit status, output); status None: killed at `limit` with everything that it started."""
        with (self.out / "suite.log").open("a+") as log:
            log.write(f"\n==== {stage.name}: {' '.join(command[1:])[:300]}\n")
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            finally:  # also what a stage that ended well has left behind
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
            log.seek(start)
            return code, log.read()

    def _save(self) -> None:
        made = {"commit": self.environment.get("SOURCE_COMMIT"), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "machine": self.machine}
        (self.out / "suite.json").write_text(json.dumps({**made, "stages": [asdict(outcome) for outcome in self.outcomes]}, indent=1) + "\n")

    @property
    def all_well(self) -> bool:
        return all(outcome.status == "ok" for outcome in self.outcomes)

    def table(self) -> str:
        lines = ["", "=" * 100]
        for outcome in self.outcomes:
            for what, text in outcome.failures[:12]:
                lines.append(f"FAILED {outcome.stage}: {what}")
                lines += [f"    {line[:200]}" for line in text.splitlines()[:4]]
            if len(outcome.failures) > 12:
                lines.append(f"FAILED {outcome.stage}: and {len(outcome.failures) - 12} more, see suite.json")
        for outcome in self.outcomes:
            lines += [f"{outcome.stage}: {note[:160]}" for note in outcome.notes[:30]]
        lines.append(f"{'stage':18} {'status':9} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}")
        lines += [f"{o.stage:18} {o.status:9} {o.passed:7} {len(o.failures):7} {o.skipped:8} {o.seconds:8.1f}" for o in self.outcomes]
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", nargs="*", default=None, help="default: all but the long soak-*, in order")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--commit", default=None, help="for the results, where the tree comes without its history")
    parser.add_argument("--select", default=None, help="pytest -k expression for the test stages")
    options = parser.parse_args()
    suite = Suite(options)
    known = {stage.name: stage for stage in stages(suite.out)}
    unknown = set(options.stage or ()) - known.keys()
    if unknown:
        parser.error(f"--stage {sorted(unknown)}: expected names out of {list(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the table is printed then too
    try:
        for name in options.stage or [name for name, stage in known.items() if not stage.only_named]:
            suite.run(known[name])
    finally:
        print(suite.table(), flush=True)
    return 0 if suite.all_well else 1


if __name__ == "__main__":
    sys.exit(main())
