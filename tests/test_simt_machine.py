"""The SIMT machine itself: resident CTAs that wait for each other, bulk copies, dead-locks as exceptions (tests/simt/exchange.cuh)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from simt.machine import INCLUDE, HopperKernel, SimtError

from deep_gemm import _C
from deep_gemm.jit import KernelSpec

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the SIMT machine needs a C++ compiler (g++)")

CTAS, WORDS, THREADS = 4, 256, 64
SMEM_BYTES = 4 * WORDS + 8


def compile_exchange(folder: Path, old: str = "", new: str = "") -> HopperKernel:
    include = folder / "changed"
    shutil.copytree(INCLUDE, include)
    text = (Path(__file__).parent / "simt" / "exchange.cuh").read_text(encoding="utf-8")
    assert old in text
    (include / "kernels" / "exchange.cuh").write_text(text.replace(old, new), encoding="utf-8")
    spec = KernelSpec(
        "exchange",
        "deep_gemm/kernels/exchange.cuh",
        "deep_gemm::kernels::exchange",
        "ExampleParams",
        {"kThreads": THREADS},
        THREADS,
        "sm_90a",
    )
    return HopperKernel(folder, spec, include=include)


def run(kernel: HopperKernel, **options) -> None:
    a = torch.randint(0, 2**20, (CTAS, WORDS), dtype=torch.int32)
    d = torch.zeros(CTAS * (WORDS + 1) + 1, dtype=torch.int32)
    unused = {"num_rows": 0, "a": bytes(128), "scale": 0.0, "symm": [], "flags": 0, "row_stride": 0}
    params = _C.pack("ExampleParams", epoch=a.data_ptr(), d=d.data_ptr(), **unused)
    kernel.launch(params, CTAS, options.pop("smem_bytes", SMEM_BYTES), **options)
    assert d[: CTAS * WORDS].view(CTAS, WORDS).equal(a + 1)
    assert d[CTAS * WORDS : -1].equal((a + 1).sum(1).roll(-1).int())


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return compile_exchange(tmp_path_factory.mktemp("exchange"))


@pytest.mark.parametrize("order", range(6))
def test_resident_ctas_wait_for_each_other(order, kernel):
    run(kernel, order=order)


def test_ctas_that_are_not_resident_dead_lock(kernel):
    with pytest.raises(SimtError, match=r"dead-lock(.|\n)*CTA 0 warp 0 lanes 0-0: (polls 0x\w+ \(last value 1\)|sleeps)"):
        run(kernel, resident=False, timeout_s=0.3)


def test_writes_past_shared_memory_are_found(kernel):
    with pytest.raises(SimtError, match="past the end of shared memory|leaves shared memory"):
        run(kernel, smem_bytes=SMEM_BYTES - 8)


FAULTS = {
    "written_too_late": ("ptx::bulk_wait<0>();", "ptx::bulk_wait_read<0>();"),
    "no_sync_before_the_store": ("fence_proxy_async_shared();\n  __syncthreads();", "fence_proxy_async_shared();"),
    "no_wait_for_the_load": ("smem.loaded.wait(0);", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, tmp_path):
    old, new = FAULTS[fault]
    broken = compile_exchange(tmp_path, old, new)
    with pytest.raises((SimtError, AssertionError)):
        run(broken)
