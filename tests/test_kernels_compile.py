"""The gate on machine code (scripts/check_kernels.py, which scripts/test runs over all kernels).

It passes one kernel of each shipped header, and catches stack frames, an ignored setmaxnreg, a GEMM without tensor cores, and a kernel that
does not compile."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import subprocess
import sys

import pytest
from jit_helpers import REPOSITORY, echo_spec

from deep_gemm import CompileError, jit


@pytest.fixture(scope="module")
def check_kernels(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("check_kernels", REPOSITORY / "scripts" / "check_kernels.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.KEPT = tmp_path_factory.mktemp("kept")  # nothing that an earlier run has read
    yield module
    del sys.modules[spec.name]


def one_per_header() -> list[jit.KernelSpec]:
    return list({spec.header: spec for spec in jit.shipped_specs("sm_90a")}.values())


# A local array that is indexed at run time lives on the stack, and a call through a pointer makes ptxas ignore setmaxnreg.
FAULTY = """#pragma once
#include <deep_gemm/layout/example_params.h>
__device__ __noinline__ int twice(int x) { return x * 2 + clock(); }
__device__ __noinline__ int thrice(int x) { return x * 3 + clock(); }
template <class Config>
__device__ void faulty(const ExampleParams& params) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  volatile int local[64];
  for (int i = 0; i < 64; ++i) local[i] = clock();
  int (*function)(int) = local[clock() % 64] & 1 ? twice : thrice;
  local[function(clock()) % 64] = 1;
  if (local[clock() % 64] == 7) asm volatile("trap;");
}
"""


@pytest.mark.parametrize("spec", one_per_header(), ids=lambda spec: spec.header)
def test_shipped_kernel_has_no_fault(check_kernels, spec):
    inspection = check_kernels.inspect(spec)
    assert inspection.faults == []
    assert 0 < inspection.registers <= 255
    assert inspection.num_hgmma > 0 or "gemm" not in spec.name


def test_stack_and_ignored_setmaxnreg_are_faults(check_kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("DG_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "faulty.cuh").write_text(FAULTY)
    tools = jit.compiler.toolchain()
    monkeypatch.setattr(jit.compiler, "toolchain", lambda: dataclasses.replace(tools, roots=(tmp_path, *tools.roots)))
    inspection = check_kernels.inspect(echo_spec(name="faulty", header="faulty.cuh", entry="faulty", threads=128))
    assert inspection.stack == 256 and inspection.num_local_accesses > 0
    stack, accesses, loss = inspection.faults
    assert "256 bytes of stack" in stack and "LDL/STL" in accesses and "setmaxnreg" in loss


def test_losses_are_found_without_the_kept_log(check_kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("DG_CACHE_DIR", str(tmp_path))
    spec = echo_spec()
    path = jit.build(spec).path
    kept = check_kernels.compiler_log(spec, path)
    path.with_suffix(".log").unlink()
    assert "Used" in kept and "Used" in check_kernels.compiler_log(spec, path)
    assert "Used" in check_kernels.compiler_log(spec, None)


def test_only_changed_machine_code_is_read_again(check_kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("DG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(check_kernels, "KEPT", tmp_path / "kept")
    reads = []
    cuobjdump = check_kernels.cuobjdump
    monkeypatch.setattr(check_kernels, "cuobjdump", lambda option, cubin: reads.append(option) or cuobjdump(option, cubin))
    first = check_kernels.inspect(echo_spec())
    assert reads == ["-res-usage", "-sass"]
    assert check_kernels.inspect(echo_spec()) == first and len(reads) == 2
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_text("{")  # a damaged one is made anew
    assert check_kernels.inspect(echo_spec()) == first and len(reads) == 4
    check_kernels.inspect(echo_spec(threads=128))
    assert len(reads) == 6


def test_gemm_without_tensor_cores_is_a_fault(check_kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("DG_CACHE_DIR", str(tmp_path))
    inspection = check_kernels.inspect(echo_spec(name="echo_gemm"))
    assert [fault for fault in inspection.faults if "HGMMA" in fault]
    assert check_kernels.inspect(echo_spec()).faults == []


def test_kernel_that_does_not_compile_stops_the_check(check_kernels, tmp_path, monkeypatch):
    monkeypatch.setenv("DG_CACHE_DIR", str(tmp_path))
    with pytest.raises(CompileError, match="no_such_entry"):
        check_kernels.inspect_all([echo_spec(), echo_spec(entry="deep_gemm::kernels::no_such_entry")])


def test_script_fails_when_nothing_matches():
    command = [sys.executable, str(REPOSITORY / "scripts" / "check_kernels.py"), "--match", "no_such_kernel"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert result.returncode == 1 and "no_such_kernel" in result.stderr
