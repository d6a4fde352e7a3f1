"""The long runs of tests/gpu/soak.py without a GPU: faults and errors are noted, a step that hangs ends the process with its row written, and the
stand-in for a collective waits for all ranks and no longer than its limit (on the SIMT machine), and compiles for the GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from jit_helpers import REPOSITORY
from simt.machine import HopperKernel

from deep_gemm import jit

sys.path.append(str(REPOSITORY / "tests" / "gpu"))
import neighbours
import soak

SIMT = pytest.mark.skipif(shutil.which("g++") is None, reason="the SIMT machine needs a C++ compiler (g++)")


def test_wrong_results_are_noted_and_other_errors_end_the_run():
    rows = []

    def step(index: int) -> None:
        if index == 1:
            raise AssertionError("y is off")
        if index == 3:
            raise RuntimeError("lost")

    soak.Record("x", seconds=60, write=rows.append).run(step)
    assert rows[0]["steps"] == 4
    assert rows[0]["faults"] == ["step 1: y is off", "step 3: RuntimeError: lost"]


def test_a_fault_of_another_rank_is_noted_and_rank_0_says_when_to_stop():
    record = soak.Record("x", seconds=60)
    answers = iter([[True, False], [(True, None), (True, "dx is off")], [False, True]])
    record.run(lambda step: None, lambda value: next(answers))
    assert record.steps == 1 and record.faults == ["step 0: rank 1: dx is off"]


def test_count_ends_a_run():
    record = soak.Record("x", count=3)
    record.run(lambda step: None)
    assert record.steps == 3
    with pytest.raises(ValueError, match=r"seconds = 0.0, count = 0: expected at least one of them above 0"):
        soak.Record("x")


HANGS = """
import sys, time
sys.path.append(r"{folder}")
import json, soak
soak.STEP_LIMIT_S = 1
record = soak.Record("x", seconds=60, write=lambda row: open(r"{out}", "w").write(json.dumps(row)))
record.run(lambda step: time.sleep(0 if step < 2 else 60))
"""


def test_a_step_that_hangs_ends_the_process_with_its_row_written(tmp_path):
    code = HANGS.format(folder=REPOSITORY / "tests" / "gpu", out=tmp_path / "row.json")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1 and "Thread" in done.stderr
    row = json.loads((tmp_path / "row.json").read_text())
    assert row["steps"] == 2 and row["faults"] == ["step 2: did not end in 1 s"]


def test_processes_that_do_not_start_are_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "STEP_LIMIT_S", 1)
    monkeypatch.setattr(soak, "worker", print)  # takes what a worker takes, and leaves no row
    path = tmp_path / "rows.json"
    monkeypatch.setattr(soak, "join", lambda context, limit_s: (context.join(), "rank 1 died")[1])
    assert soak.main(["routing", "--processes", "--on-cpu", "--seconds", "1", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["rows"][0]["faults"] == ["rank 1 died"]


def test_virtual_ranks_leave_sms_to_collectives():
    assert neighbours.sms_of_rank(132, 4) == 17
    with pytest.raises(ValueError, match=r"num_ranks = 8: expected at most 7 virtual ranks"):
        neighbours.sms_of_rank(132, 8)


def test_stand_in_compiles_for_the_gpu():
    log = Path(jit.build(neighbours.collective_spec()).path)
    assert log.exists()


@SIMT
def test_stand_in_waits_for_all_ranks_and_no_longer_than_its_limit(tmp_path):
    kernel = HopperKernel(tmp_path, neighbours.collective_spec(limit_s=1))
    words = torch.zeros(3, dtype=torch.int32)
    ends = {}

    def rank(index: int, calls: int) -> None:
        kernel.launch(neighbours.pack_collective(words.data_ptr(), 2 * calls, 10), 2, 0)
        ends[index] = time.monotonic()

    first = threading.Thread(target=rank, args=(0, 1))
    first.start()
    time.sleep(0.2)
    begin = time.monotonic()
    rank(1, 1)
    first.join()
    assert ends[0] > begin and words.tolist() == [2, 2, 0]
    rank(0, 2)  # the other rank does not come
    assert words.tolist() == [3, 3, 2]
