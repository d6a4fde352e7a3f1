"""Compile many kernels before they are needed, in parallel processes (NVRTC compiles one program at a time per process)."""

from __future__ import annotations

import base64
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..errors import CompileError
from . import cache, compiler, headers, loader, pack
from .spec import KernelSpec


@dataclass
class WarmupReport:
    """What `warmup` did. compiled: names of the kernels compiled by this call; cached: found in pack or disk, or made meanwhile by another
    process; failures: spec -> compiler text; workers: processes used; seconds: wall clock."""

    compiled: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    failures: dict[KernelSpec, str] = field(default_factory=dict)
    workers: int = 0
    seconds: float = 0.0

    def raise_failures(self) -> None:
        """Raises CompileError with the text of every kernel that did not compile."""
        if self.failures:
            raise CompileError("\n\n".join(self.failures.values()))


def default_workers() -> int:
    """Cores that this process may use; a compilation takes one core and about 0.4 GB."""
    return len(os.sched_getaffinity(0))


def attempt(spec: KernelSpec) -> dict[str, str]:
    """Builds into the cache: {"origin": ...}, or {"error": text}, so that one kernel's failure does not stop the others."""
    try:
        return {"origin": loader.build(spec).origin}
    except (RuntimeError, OSError) as error:
        return {"error": str(error)}


class _Worker:
    """One child process; started at the first spec, so that a warm cache starts none."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def build(self, spec: KernelSpec) -> dict[str, str]:
        if self._process is None:
            path = os.pathsep.join(filter(None, (str(headers.PACKAGE.parent), os.environ.get("PYTHONPATH"))))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "deep_gemm.jit.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        try:
            self._process.stdin.write(base64.b64encode(pickle.dumps(spec)).decode() + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        status = self._process.wait()
        self._process = None  # the next spec gets a new process
        return {"error": f"kernel {spec}: the compiling process ended with status {status} (killed for memory?)"}

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()


class _Local:
    """Compiles in this process: for a cache folder that a child could not hand its cubins over in."""

    def build(self, spec: KernelSpec) -> dict[str, str]:
        return attempt(spec)

    def close(self) -> None:
        pass


def _record(report: WarmupReport, spec: KernelSpec, answer: dict[str, str], show: bool, total: int) -> None:
    if "error" in answer:
        report.failures[spec] = answer["error"]
    else:
        (report.compiled if answer["origin"] == "compiled" else report.cached).append(str(spec))
    if show:
        done = len(report.compiled) + len(report.cached) + len(report.failures)
        print(f"deep_gemm: {done}/{total} {answer.get('origin', 'FAILED')} {spec}", file=sys.stderr, flush=True)


def warmup(specs: Iterable[KernelSpec], max_workers: int | None = None, *, progress: bool = False) -> WarmupReport:
    """Fills the disk cache with the cubins of `specs`. Needs no GPU.

    specs        for example jit.shipped_specs("sm_90a"); duplicates count once
    max_workers  processes; default: one per core of this process
    progress     print a line per kernel to stderr
    Returns      WarmupReport; a kernel that does not compile is in its `failures` and does not stop the others
    Raises       BackendUnavailable when a kernel is not in the pack and NVRTC or the headers are missing
    """
    begin, report, todo = time.perf_counter(), WarmupReport(), queue.SimpleQueue()
    unique = list(dict.fromkeys(specs))
    pending = []
    for spec in unique:
        if pack.find(spec) or cache.find(compiler.key(spec)):
            _record(report, spec, {"origin": "cached"}, progress, len(unique))
        else:
            pending.append(spec)
            todo.put(spec)
    in_children = cache.writable()
    report.workers = min(len(pending), max_workers or default_workers()) if in_children else min(len(pending), 1)
    lock = threading.Lock()

    def drive() -> None:
        builder = _Worker() if in_children else _Local()
        try:
            while True:
                try:
                    spec = todo.get_nowait()
                except queue.Empty:
                    return
                answer = builder.build(spec)
                with lock:
                    _record(report, spec, answer, progress, len(unique))
        finally:
            builder.close()

    threads = [threading.Thread(target=drive, name=f"deep_gemm-warmup-{i}") for i in range(report.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report.seconds = time.perf_counter() - begin
    return report
