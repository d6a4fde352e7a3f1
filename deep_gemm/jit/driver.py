"""The CUDA driver through cuda-bindings: entry points for the extension, contexts, and errors in words."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ..errors import BackendUnavailable


class Driver:
    """cu: cuda.bindings.driver, initialised; version: (major, minor) of CUDA that the driver supports."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver as cu
        except ImportError as error:
            raise BackendUnavailable(f"cuda-bindings is not installed ({error}): pip install 'cuda-bindings>=13.0.3,<14'") from error
        self.cu = cu
        try:
            self.version = _split_version(self.check("cuDriverGetVersion", cu.cuDriverGetVersion()))
        except RuntimeError as error:
            raise BackendUnavailable(f"no CUDA driver on this machine ({error}): kernels need an NVIDIA GPU and its driver") from error
        try:
            self.check("cuInit", cu.cuInit(0))
        except RuntimeError as error:
            raise BackendUnavailable(f"the CUDA driver does not start ({error})") from error
        self._contexts: dict[int, object] = {}
        self._lock = threading.Lock()

    def check(self, what: str, result: tuple) -> object:
        """The value of a driver call's result tuple (None when it has none); RuntimeError with the driver's words otherwise."""
        status, *values = result
        if int(status):
            raise RuntimeError(f"{what} failed: {self.describe(int(status))}")
        return values[0] if len(values) == 1 else tuple(values) if values else None

    def describe(self, code: int) -> str:
        """`CUDA_ERROR_INVALID_VALUE (1): invalid argument`."""
        status = self.cu.CUresult(code)
        return f"{status.name} ({code}): {(self.cu.cuGetErrorString(status)[1] or b'').decode()}"

    def entry_point(self, name: str) -> int:
        address, _ = self.check(f"cuGetProcAddress({name})", self.cu.cuGetProcAddress(name.encode(), 12000, 0))
        if not int(address):
            raise BackendUnavailable(f"the CUDA driver {self.version[0]}.{self.version[1]} has no {name}: CUDA 12 or later is needed")
        return int(address)

    def _primary_context(self, device_index: int) -> object:
        with self._lock:
            if device_index not in self._contexts:
                device = self.check("cuDeviceGet", self.cu.cuDeviceGet(device_index))
                self._contexts[device_index] = self.check("cuDevicePrimaryCtxRetain", self.cu.cuDevicePrimaryCtxRetain(device))
            return self._contexts[device_index]

    def set_context(self, device_index: int) -> None:
        """Makes the device's primary context current in this thread, for good."""
        self.check("cuCtxSetCurrent", self.cu.cuCtxSetCurrent(self._primary_context(device_index)))

    @contextmanager
    def context(self, device_index: int) -> Iterator[int]:
        """Makes the device's primary context (torch's own) current; yields the device handle."""
        device = self.check("cuDeviceGet", self.cu.cuDeviceGet(device_index))
        self.check("cuCtxPushCurrent", self.cu.cuCtxPushCurrent(self._primary_context(device_index)))
        try:
            yield device
        finally:
            self.cu.cuCtxPopCurrent()

    @contextmanager
    def relaxed_capture(self) -> Iterator[None]:
        """Lets this thread load modules while a stream of it is being captured into a graph."""
        relaxed = self.cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        previous = self.check("cuThreadExchangeStreamCaptureMode", self.cu.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            yield
        finally:
            self.cu.cuThreadExchangeStreamCaptureMode(previous)

    def attribute(self, device: int, name: str) -> int:
        attribute = getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return self.check("cuDeviceGetAttribute", self.cu.cuDeviceGetAttribute(attribute, device))


def _split_version(number: int) -> tuple[int, int]:
    return number // 1000, number % 1000 // 10


@functools.cache
def cuda_version() -> tuple[int, int] | None:
    """(major, minor) of CUDA that the driver supports; None without a driver. Does not start the driver, so a child made by fork still may."""
    try:
        from cuda.bindings import driver as cu

        status, number = cu.cuDriverGetVersion()
    except (ImportError, RuntimeError):  # no cuda-bindings; no libcuda
        return None
    return None if int(status) else _split_version(number)


@functools.cache
def get() -> Driver:
    """The driver; BackendUnavailable when there is none."""
    return Driver()


@functools.cache
def extension() -> ModuleType:
    """deep_gemm._C."""
    try:
        from .. import _C
    except ImportError as error:
        raise BackendUnavailable(
            f"the host extension deep_gemm._C is not built ({error}): run `python setup.py build_ext --inplace` in the source "
            "checkout, or install the wheel"
        ) from error
    return _C


@functools.cache
def connect() -> None:
    """Gives the extension the driver's entry points. The extension calls this at its first launch or tensor map."""
    driver = get()
    names = ("cuCtxGetCurrent", "cuLaunchKernelEx", "cuTensorMapEncodeTiled")
    extension().set_driver(**{name: driver.entry_point(name) for name in names})


def bind_thread() -> None:
    """Gives this thread the context of torch's current device. The extension calls this before a launch or tensor map in a thread that has none:
    torch's autograd starts threads whose first CUDA call may be ours."""
    import torch

    get().set_context(torch.cuda.current_device())


@functools.cache
def device_arch(device_index: int) -> str:
    """Architecture to compile for on this device: "sm_90a" for compute capability 9.0."""
    driver = get()
    device = driver.check("cuDeviceGet", driver.cu.cuDeviceGet(device_index))
    return f"sm_{driver.attribute(device, 'COMPUTE_CAPABILITY_MAJOR')}{driver.attribute(device, 'COMPUTE_CAPABILITY_MINOR')}a"
