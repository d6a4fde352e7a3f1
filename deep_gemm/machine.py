"""What this machine has: gathered once, without raising, and without a context on any GPU. What it means is said in doctor.py."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import BackendUnavailable
from .jit import compiler, driver

DRIVER_VERSION = Path("/sys/module/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """exports_memory: other processes can map its memory, as symmetric memory needs."""

    index: int
    name: str
    capability: tuple[int, int]
    gigabytes: float
    exports_memory: bool


@dataclass(frozen=True)
class Link:
    """From one GPU to another. access: kernels of `source` can address memory of `target`; atomics: and do atomics there, which NVLink
    has and PCIe has not."""

    source: int
    target: int
    access: bool
    atomics: bool


@dataclass(frozen=True)
class Machine:
    """Each part, or None (empty) and the reason why not."""

    torch: Any = None
    torch_error: str = ""
    driver_cuda: tuple[int, int] | None = None  # the CUDA version that the driver supports
    driver_version: str = ""
    driver_error: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    tools: compiler.Toolchain | None = None
    tools_error: str = ""
    extension_error: str = ""


def _attempt(function, *errors: type[Exception]) -> tuple[Any, str]:
    try:
        return function(), ""
    except errors as error:
        return None, str(error) or type(error).__name__


def _gpu(found: driver.Driver, index: int) -> Gpu:
    cu = found.cu
    device = found.check("cuDeviceGet", cu.cuDeviceGet(index))
    name = found.check("cuDeviceGetName", cu.cuDeviceGetName(128, device)).split(b"\0")[0].decode(errors="replace")
    capability = (found.attribute(device, "COMPUTE_CAPABILITY_MAJOR"), found.attribute(device, "COMPUTE_CAPABILITY_MINOR"))
    exports = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
    total = found.check("cuDeviceTotalMem", cu.cuDeviceTotalMem(device))
    return Gpu(index, name, capability, total / 2**30, all(found.attribute(device, attribute) for attribute in exports))


def _link(found: driver.Driver, source: int, target: int) -> Link:
    cu, kinds = found.cu, found.cu.CUdevice_P2PAttribute
    ends = [found.check("cuDeviceGet", cu.cuDeviceGet(index)) for index in (source, target)]
    access, atomics = (
        bool(found.check("cuDeviceGetP2PAttribute", cu.cuDeviceGetP2PAttribute(kind, *ends)))
        for kind in (kinds.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, kinds.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)
    )
    return Link(source, target, access, atomics)


def _gpus_and_links(found: driver.Driver) -> tuple[list[Gpu], list[Link]]:
    count = found.check("cuDeviceGetCount", found.cu.cuDeviceGetCount())
    pairs = [(source, target) for source in range(count) for target in range(count) if source != target]
    return [_gpu(found, index) for index in range(count)], [_link(found, *pair) for pair in pairs]


def inspect() -> Machine:
    """This machine, as this process sees it (CUDA_VISIBLE_DEVICES)."""
    # A torch that is there and broken raises OSError (a library of its own not found) as well as ImportError.
    torch, torch_error = _attempt(lambda: importlib.import_module("torch"), ImportError, OSError)
    found, driver_error = _attempt(driver.get, BackendUnavailable)
    seen, gpu_error = _attempt(lambda: _gpus_and_links(found), RuntimeError) if found else (None, "")
    tools, tools_error = _attempt(compiler.toolchain, BackendUnavailable)
    _, extension_error = _attempt(driver.extension, BackendUnavailable)
    version, _ = _attempt(lambda: DRIVER_VERSION.read_text().strip(), OSError)
    gpus, links = seen or ([], [])
    return Machine(
        torch=torch,
        torch_error=torch_error,
        driver_cuda=found.version if found else None,
        driver_version=version or "",
        driver_error=driver_error or gpu_error,
        gpus=gpus,
        links=links,
        tools=tools,
        tools_error=tools_error,
        extension_error=extension_error,
    )
