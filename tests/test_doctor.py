"""`deep-gemm doctor`: every part is judged for machines that are not here, through fakes; and the command runs on this one, and without torch.

A fault is FAIL where there is a GPU that it keeps from working, and says what to do."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cuda.bindings import driver as cuda
from jit_helpers import REPOSITORY

from deep_gemm import doctor, jit, machine
from deep_gemm.__main__ import main
from deep_gemm._version import __version__
from deep_gemm.jit import compiler, driver

H200 = (9, 0)
TOOLS = compiler.Toolchain(nvrtc=None, version=(13, 0), build=1, roots=(), cuda_include=Path("/cuda/include"))


def fake_torch(version: str = "2.13.0+cu130", cuda: str | None = "13.0", available: bool = True) -> SimpleNamespace:
    return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(is_available=lambda: available))


def node(gpus: int = 8, capability: tuple[int, int] = H200, **changes) -> machine.Machine:
    """A host with everything in order, less `changes`."""
    whole = machine.Machine(
        torch=fake_torch(),
        driver_cuda=(13, 0),
        driver_version="580.95.05",
        gpus=[machine.Gpu(index, "NVIDIA H200", capability, 139.8, exports_memory=True) for index in range(gpus)],
        links=[
            machine.Link(source, target, access=True, atomics=True) for source in range(gpus) for target in range(gpus) if source != target
        ],
        tools=TOOLS,
    )
    return dataclasses.replace(whole, **changes)


def set_pack(
    monkeypatch, folder: Path, entries: int = 0, usable: bool = False, reason: str | None = "this package came without one"
) -> None:
    real = jit.status
    pack = {"dir": str(folder), "entries": entries, "usable": usable, "reason": reason}
    monkeypatch.setattr(doctor.jit, "status", lambda: {**real(), "pack": pack})


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DG_CACHE_DIR", str(tmp_path / "cache"))
    set_pack(monkeypatch, tmp_path / "no pack")


def line(found: machine.Machine, name: str) -> doctor.Line:
    (match,) = [line for line in doctor.examine(found) if line.name == name]
    return match


def test_host_with_everything_in_order_is_ok_throughout():
    lines = doctor.examine(node())
    assert [line for line in lines if line.state != "OK" or line.remedy] == []
    assert line(node(), "GPU 7").found == "NVIDIA H200, compute capability 9.0, 140 GiB"
    assert line(node(), "GPU to GPU").found == "peer access with native atomics (NVLink) between all 8"
    assert line(node(1), "GPU to GPU").state == "OK"
    assert line(node(), "driver").found == "580.95.05, for CUDA 13.0"


FAULTS = {
    "torch absent": ({"torch": None, "torch_error": "No module named 'torch'"}, "torch", "FAIL", "pip install 'torch>=2.9'"),
    "torch old": ({"torch": fake_torch("2.8.1")}, "torch", "FAIL", "pip install 'torch>=2.9'"),
    "torch for the CPU": ({"torch": fake_torch("2.13.0+cpu", None)}, "torch", "FAIL", "CUDA build of torch"),
    "torch blind": ({"torch": fake_torch(available=False)}, "torch", "FAIL", "torch.cuda.init()"),
    "driver older than NVRTC": ({"driver_cuda": (12, 8)}, "driver", "FAIL", "update it to 580 or later"),
    "no NVRTC": (
        {"tools": None, "tools_error": "NVRTC, it says, is not installed: pip install 'x'"},
        "NVRTC, headers",
        "FAIL",
        "pip install 'x'",
    ),
    "no extension": ({"extension_error": "deep_gemm._C is not built: run `y`, or install z"}, "extension", "FAIL", "run `y`, or install z"),
    "memory not shareable": (
        {"gpus": [machine.Gpu(0, "vGPU", H200, 20.0, exports_memory=False)], "links": []},
        "symmetric memory",
        "WARN",
        "virtual GPU",
    ),
    "PCIe": ({"links": [machine.Link(0, 1, access=True, atomics=False)]}, "GPU to GPU", "WARN", "nvidia-smi topo -m"),
    "no peer access": ({"links": [machine.Link(0, 1, access=False, atomics=False)]}, "GPU to GPU", "WARN", "CUDA_VISIBLE_DEVICES"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_named_with_what_to_do(fault):
    changes, name, state, remedy = FAULTS[fault]
    faulty = dataclasses.replace(node(2), **changes)
    found = line(faulty, name)
    assert found.state == state and remedy in found.remedy
    others = [other for other in doctor.examine(faulty) if other.state == "FAIL" and other.name != name]
    assert others == [], "one fault, one line"


def test_gpu_without_kernels_fails_alone_and_warns_beside_a_hopper():
    blackwell = machine.Gpu(1, "NVIDIA B200", (10, 0), 178.0, exports_memory=True)
    assert line(node(1, capability=(8, 0)), "GPU 0").state == "FAIL"
    mixed = node(1)
    mixed.gpus.append(blackwell)
    assert (line(mixed, "GPU 0").state, line(mixed, "GPU 1").state) == ("OK", "WARN")


def test_machine_without_gpu_warns_of_what_only_kernels_need():
    bare = machine.Machine(
        torch=fake_torch("2.13.0+cpu", None, False), driver_error="no CUDA driver on this machine", tools_error="no NVRTC: pip install z"
    )
    lines = doctor.examine(bare)
    assert {line.name for line in lines if line.state == "WARN"} == {"GPU", "driver", "NVRTC, headers", "symmetric memory"}
    assert not [line for line in lines if line.state == "FAIL"]


def test_driver_that_is_loaded_and_does_not_answer_fails():
    broken = machine.Machine(driver_version="580.95.05", driver_error="the CUDA driver does not start (CUDA_ERROR_SYSTEM_NOT_READY)")
    assert line(broken, "driver").state == "FAIL"
    hidden = machine.Machine(
        driver_version="580.95.05", driver_error="the CUDA driver does not start (cuInit failed: CUDA_ERROR_NO_DEVICE (100))"
    )
    assert line(hidden, "driver").state == "WARN" and "CUDA_VISIBLE_DEVICES" in line(hidden, "driver").remedy


def test_headers_that_are_absent_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.headers, "PACKAGE", tmp_path)
    found = line(node(), "our headers")
    assert found.state == "FAIL" and "no CUTLASS, CCCL, deep_gemm in" in found.found


def test_cache_that_cannot_be_written_warns(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DG_CACHE_DIR", str(tmp_path / "file" / "below"))
    found = line(node(), "JIT cache")
    assert found.state == "WARN" and "set DG_CACHE_DIR" in found.remedy


def test_kernels_of_the_cache_are_counted(tmp_path):
    (tmp_path / "cache").mkdir()
    for number in range(2):
        (tmp_path / "cache" / f"{number}.cubin").write_bytes(bytes(2**20))
    assert line(node(), "JIT cache").found == f"{tmp_path / 'cache'}: 2 kernels, 2.0 MiB"


def test_pack_that_is_not_used_warns_and_one_that_is_serves_without_nvrtc(monkeypatch, tmp_path):
    assert line(node(), "kernel pack").state == "OK"
    set_pack(monkeypatch, tmp_path, entries=40, reason="it was made for CUDA 13, the driver supports CUDA 12.8")
    assert line(node(), "kernel pack").state == "WARN" and "CUDA 12.8" in line(node(), "kernel pack").found
    bare = node(tools=None, tools_error="NVRTC is not installed: pip install 'x'")
    assert line(bare, "NVRTC, headers").state == "FAIL"
    set_pack(monkeypatch, tmp_path, entries=40, usable=True, reason=None)
    assert line(node(), "kernel pack") == doctor.Line("kernel pack", "OK", f"40 kernels in {tmp_path}")
    assert (line(bare, "NVRTC, headers").state, line(bare, "NVRTC, headers").remedy) == ("WARN", "pip install 'x'")


def test_second_owner_of_the_package_fails(monkeypatch, tmp_path):
    for info in (f"deep_gemm-{__version__}.dist-info", "sgl_deep_gemm-0.2.5.dist-info"):
        (tmp_path / info).mkdir()
        (tmp_path / info / "RECORD").write_text("deep_gemm/__init__.py,,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = line(node(), "installed as")
    assert found.state == "FAIL" and "sgl-deep-gemm 0.2.5" in found.found and "pip uninstall deep-gemm sgl-deep-gemm" in found.remedy
    shutil.rmtree(tmp_path / "sgl_deep_gemm-0.2.5.dist-info")
    assert line(node(), "installed as") == doctor.Line("installed as", "OK", f"deep-gemm {__version__} in {tmp_path}")


def test_check_that_crashes_is_a_line_and_the_others_follow(monkeypatch):
    def check_surprise(_):
        raise KeyError("what")

    monkeypatch.setattr(doctor, "CHECKS", (check_surprise, doctor.check_torch))
    lines = doctor.examine(node())
    assert [line.state for line in lines] == ["FAIL", "OK"] and lines[0].name == "surprise" and "KeyError" in lines[0].found


class FakeCuda:
    """The driver's functions that are asked, for two GPUs, the second of which does not reach the first."""

    # The real enumerations, so that a name that they lack is found here.
    CUdevice_attribute = cuda.CUdevice_attribute
    CUdevice_P2PAttribute = cuda.CUdevice_P2PAttribute

    def cuDriverGetVersion(self):
        return 0, 13010

    def cuInit(self, flags):
        return (0,)

    def cuDeviceGetCount(self):
        return 0, 2

    def cuDeviceGet(self, index):
        return 0, index

    def cuDeviceGetName(self, length, device):
        return 0, b"NVIDIA H200" + bytes(length - 11)

    def cuDeviceTotalMem(self, device):
        return 0, 150 * 2**30

    def cuDeviceGetAttribute(self, kind, device):
        return 0, {"COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0}.get(kind.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 1)

    def cuDeviceGetP2PAttribute(self, kind, source, target):
        return 0, int(source == 0)


def test_fake_has_no_function_that_the_driver_lacks():
    assert [name for name in vars(FakeCuda) if name.startswith("cu") and not hasattr(cuda, name)] == []


def test_inspect_reads_gpus_and_links_from_the_driver(monkeypatch, tmp_path):
    found = object.__new__(driver.Driver)
    found.cu, found.version = FakeCuda(), (13, 1)
    monkeypatch.setattr(machine.driver, "get", lambda: found)
    (tmp_path / "version").write_text("580.95.05\n")
    monkeypatch.setattr(machine, "DRIVER_VERSION", tmp_path / "version")
    seen = machine.inspect()
    assert seen.gpus == [machine.Gpu(index, "NVIDIA H200", (9, 0), 150.0, exports_memory=True) for index in (0, 1)]
    assert seen.links == [machine.Link(0, 1, access=True, atomics=True), machine.Link(1, 0, access=False, atomics=False)]
    assert (seen.driver_cuda, seen.driver_version, seen.driver_error) == ((13, 1), "580.95.05", "")


def test_driver_that_fails_later_is_an_error_and_no_crash(monkeypatch):
    found = object.__new__(driver.Driver)
    found.cu, found.version = FakeCuda(), (13, 1)
    monkeypatch.setattr(found, "check", lambda what, result: (_ for _ in ()).throw(RuntimeError(f"{what} failed: code 802")), raising=False)
    monkeypatch.setattr(machine.driver, "get", lambda: found)
    seen = machine.inspect()
    assert seen.gpus == [] and seen.driver_error == "cuDeviceGetCount failed: code 802"


@pytest.mark.parametrize(("state", "status"), [("OK", 0), ("WARN", 0), ("FAIL", 1)])
def test_exit_status_and_json(monkeypatch, capsys, state, status):
    monkeypatch.setattr(doctor, "diagnose", lambda: [doctor.Line("part", state, "found", "do this")])
    assert main(["doctor", "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (status == 0) and report["version"] == __version__
    assert report["lines"] == [{"name": "part", "state": state, "found": "found", "remedy": "do this"}]
    assert main(["doctor"]) == status
    screen = capsys.readouterr().out.splitlines()
    assert screen[1].split() == [state, "part", "found"] and screen[2].strip() == "-> do this"


def doctor_in(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DG_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, *options, "-m", "deep_gemm", "doctor", "--json"]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)


def test_command_runs_on_this_machine(tmp_path):
    result = doctor_in(tmp_path)
    states = {line["name"]: line["state"] for line in json.loads(result.stdout)["lines"]}
    assert states["torch"] == states["extension"] == states["our headers"] == "OK"
    assert result.returncode == ("FAIL" in states.values()) and result.stderr == ""


def test_command_runs_where_nothing_is_installed(tmp_path):
    result = doctor_in(tmp_path, "-S")  # no site-packages: no torch, cuda-bindings, NVRTC
    lines = {line["name"]: line for line in json.loads(result.stdout)["lines"]}
    assert result.returncode == 1 and [name for name, line in lines.items() if line["state"] == "FAIL"] == ["torch"]
    assert lines["NVRTC, headers"]["remedy"] == "pip install 'cuda-bindings>=13.0.3,<14'"
