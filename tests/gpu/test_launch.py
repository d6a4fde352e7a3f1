"""The launch path on a GPU: host and device agree on a struct's layout, launch attributes reach the kernel, a wrong launch speaks, and the
host's share of a launch is small."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from jit_helpers import echo_spec

from deep_gemm import _C, jit

pytestmark = pytest.mark.gpu
MAX_RANKS, NUM_WORDS = 72, 1 + 1 + 16 + 1 + 1 + 72 + 3


@pytest.fixture(scope="module")
def kernel():
    return jit.load(echo_spec(mark=-5, arch=jit.device_arch(0)), 0)


@pytest.fixture
def out():
    return torch.full((NUM_WORDS,), -1, dtype=torch.int64, device="cuda")


def params(out: torch.Tensor, **changes) -> bytes:
    fields = {
        "num_rows": -3, "a": bytes(range(128)), "d": out.data_ptr(), "scale": 1.5, "symm": list(range(100, 100 + MAX_RANKS)),
        "flags": 2**32 - 1, "row_stride": -(2**62), "epoch": 2**63 - 1,
    }  # fmt: skip
    return _C.pack("ExampleParams", **{**fields, **changes})


def expected(out: torch.Tensor) -> list[int]:
    words = [int.from_bytes(bytes(range(8 * i, 8 * i + 8)), "little", signed=True) for i in range(16)]
    return [-5, -3, *words, out.data_ptr(), 0x3FC00000, *range(100, 100 + MAX_RANKS), 2**32 - 1, -(2**62), 2**63 - 1]


@pytest.mark.parametrize(
    "options", [{}, {"cluster": 2}, {"cluster": 16}, {"cooperative": True}, {"pdl": True}, {"cluster": 2, "pdl": True}]
)
def test_device_reads_the_fields_that_the_host_packed(kernel, out, options):
    smem = 1024 if options.get("cluster") == 16 else kernel.max_dynamic_smem_bytes  # 16 whole SMs of one GPC may not be free
    kernel.launch(params(out), 16, smem, torch.cuda.current_stream().cuda_stream, **options)
    assert out.tolist() == expected(out)


def test_kernel_loads_and_launches_while_a_graph_is_captured(out):
    spec = echo_spec(mark=-5, arch=jit.device_arch(0), min_blocks=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        jit.load(spec, 0).launch(params(out), 1, 0, torch.cuda.current_stream().cuda_stream)
    assert out.tolist() == [-1] * NUM_WORDS
    graph.replay()
    assert out.tolist() == expected(out)


def test_thread_that_has_made_no_cuda_call_launches(kernel, out):
    failures = []

    def work():  # like a thread of autograd whose first CUDA call is ours
        try:
            kernel.launch(packed, 1, 0, 0)
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    packed = params(out)
    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
    assert out.tolist() == expected(out)


def test_wrong_launch_names_kernel_and_reason(kernel, out):
    with pytest.raises(RuntimeError, match=r"kernel echo_params\(kMark=-5\).*CUDA_ERROR_INVALID_VALUE \(1\)"):
        kernel.launch(params(out), 1, kernel.max_dynamic_smem_bytes + 1, torch.cuda.current_stream().cuda_stream)
    kernel.launch(params(out), 1, 0, torch.cuda.current_stream().cuda_stream)
    assert out.tolist() == expected(out)


def test_tensor_map_of_a_real_tensor():
    x = torch.zeros(256, 512, dtype=torch.bfloat16, device="cuda")
    assert len(_C.tensor_map(x.data_ptr(), "bf16", (512, 256), (1024,), (64, 128), 128)) == 128


def test_launch_costs_the_host_little(kernel, out):
    packed, stream = params(out), torch.cuda.current_stream().cuda_stream
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(50):  # fewer than the queue of launches holds
            kernel.launch(packed, 1, 0, stream)
        times.append((time.perf_counter() - begin) / 50 * 1e6)
    print(f"host time of a launch, driver included: {min(times):.2f} us")
    assert min(times) < 20.0, "the driver alone takes 2 to 4 us"
