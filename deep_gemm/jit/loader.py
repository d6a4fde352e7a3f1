"""KernelSpec -> cubin -> kernel loaded on a device, and its launch."""

from __future__ import annotations

import re
import sys
import threading

from .. import environment
from ..errors import BackendUnavailable
from . import cache, compiler, driver, pack
from .cache import Entry
from .spec import KernelSpec


class LoadedKernel:
    """A kernel on one device. Made by `load`.

    registers, spill_bytes, static_smem_bytes   of the cubin: registers per thread, local memory per thread, shared memory per CTA
    max_dynamic_smem_bytes                      largest `smem_bytes` that a launch may ask for on this device
    """

    def __init__(self, spec: KernelSpec, device_index: int, cubin: bytes):
        self.spec = spec
        self.device_index = device_index
        self._launch = driver.extension().launch
        cu = driver.get().cu
        with driver.get().relaxed_capture(), driver.get().context(device_index) as device:
            check = driver.get().check
            self._library = check(f"cuLibraryLoadData({spec})", cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
            kernel = check(f"cuLibraryGetKernel({spec.name})", cu.cuLibraryGetKernel(self._library, spec.name.encode()))
            function = check("cuKernelGetFunction", cu.cuKernelGetFunction(kernel))
            self.registers = self._attribute(function, "NUM_REGS")
            self.spill_bytes = self._attribute(function, "LOCAL_SIZE_BYTES")
            self.static_smem_bytes = self._attribute(function, "SHARED_SIZE_BYTES")
            limit = driver.get().attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
            self.max_dynamic_smem_bytes = limit - self.static_smem_bytes
            self._set(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES", self.max_dynamic_smem_bytes)
            self._set(function, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        self.function = int(function)

    @staticmethod
    def _attribute(function: object, name: str) -> int:
        cu = driver.get().cu
        attribute = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        return driver.get().check("cuFuncGetAttribute", cu.cuFuncGetAttribute(attribute, function))

    @staticmethod
    def _set(function: object, name: str, value: int) -> None:
        cu = driver.get().cu
        attribute = getattr(cu.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        driver.get().check(f"cuFuncSetAttribute({name}, {value})", cu.cuFuncSetAttribute(function, attribute, value))

    def launch(
        self,
        params: bytes,
        grid: int | tuple[int, ...],
        smem_bytes: int,
        stream: int,
        cluster: int = 1,
        cooperative: bool = False,
        pdl: bool = False,
    ) -> None:
        """Launches on `stream` (a handle: torch's `Stream.cuda_stream`) of this kernel's device, which must be the current one.

        params      bytes of the kernel's struct, from _C.pack
        grid        CTAs, int or up to three; grid[0] is a multiple of `cluster` (1 to 16 CTAs)
        smem_bytes  dynamic shared memory per CTA
        pdl         may begin before the previous kernel of the stream ends; the kernel then waits by griddepcontrol
        """
        try:
            self._launch(self.function, params, grid, self.spec.threads, smem_bytes, stream, cluster, cooperative, pdl)
        except RuntimeError as error:
            raise RuntimeError(f"kernel {self.spec} on device {self.device_index}: {_in_words(str(error))}") from error


def _in_words(text: str) -> str:
    match = re.search(r"CUresult (\d+)", text)
    return f"{text}: {driver.get().describe(int(match[1]))}" if match else text


_loaded: dict[tuple[KernelSpec, int], LoadedKernel] = {}
_load_lock = threading.Lock()


def _from_pack(spec: KernelSpec) -> Entry | None:
    entry = pack.find(spec)
    if entry is not None:
        cache.counters["hits_pack"] += 1
    return entry


def _from_disk_or_compiler(spec: KernelSpec) -> Entry:
    def compile_now() -> tuple[bytes, str]:
        compiled = compiler.compile_spec(spec)
        report = f"{spec}\n{' '.join(compiler.flags(spec.arch))}\n{compiled.seconds:.2f} s\n{compiled.log}"
        if environment.flag("DG_JIT_VERBOSE"):
            print(f"deep_gemm: compiled {report}", file=sys.stderr, flush=True)
        return compiled.cubin, report

    return cache.get_or_build(compiler.key(spec), compile_now)


def build(spec: KernelSpec) -> Entry:
    """The cubin of `spec` from pack, disk or compiler. Needs no GPU; a kernel of the pack needs no compiler either. `Entry.path` is its
    file (cuobjdump reads it)."""
    return _from_pack(spec) or _from_disk_or_compiler(spec)


def _check_driver() -> None:
    """Raises BackendUnavailable when the driver cannot load what this machine's compiler makes."""
    version, tools = driver.get().version, compiler.toolchain()
    if version[0] < tools.version[0]:
        raise BackendUnavailable(
            f"the driver supports CUDA {version[0]}.{version[1]}, the compiler is NVRTC {tools.version[0]}.{tools.version[1]}: its cubins "
            f"need a driver for CUDA {tools.version[0]}; update the driver, or install torch and NVRTC for CUDA {version[0]}"
        )


def _check_device(spec: KernelSpec, device_index: int) -> None:
    arch = driver.device_arch(device_index)
    if arch.rstrip("af") != spec.arch.rstrip("af"):
        raise BackendUnavailable(f"kernel {spec}, but device {device_index} is {arch.rstrip('a')}")


def load(spec: KernelSpec, device_index: int) -> LoadedKernel:
    """The kernel on a device: compiled on the first use anywhere, loaded on the first use in this process, a table look-up afterwards."""
    kernel = _loaded.get((spec, device_index))
    if kernel is not None:
        cache.counters["hits_memory"] += 1
        return kernel
    with _load_lock:
        if (spec, device_index) not in _loaded:
            _check_device(spec, device_index)
            entry = _from_pack(spec)
            if entry is None:
                _check_driver()
                entry = _from_disk_or_compiler(spec)
            kernel = LoadedKernel(spec, device_index, entry.cubin)
            if environment.flag("DG_JIT_VERBOSE"):
                sizes = f"{kernel.registers} registers, {kernel.spill_bytes} bytes of local memory"
                print(f"deep_gemm: loaded {spec} on device {device_index} ({entry.origin}): {sizes}", file=sys.stderr, flush=True)
            _loaded[spec, device_index] = kernel
    return _loaded[spec, device_index]


def forget() -> None:
    """Empties the table of loaded kernels; those in use stay valid."""
    with _load_lock:
        _loaded.clear()


def count() -> int:
    """Number of kernels loaded on devices."""
    return len(_loaded)
