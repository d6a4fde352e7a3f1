"""NVRTC through cuda-bindings: generated source -> cubin. Never PTX: a driver older than the compiler could not translate it."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import environment
from ..errors import BackendUnavailable, CompileError
from . import headers
from .spec import KernelSpec

# -default-device: CUTLASS leaves constexpr functions undecorated. C++20 for the concepts of the rooms.
_FLAGS = ("-std=c++20", "-default-device", "-DNDEBUG", "--ptxas-options=-v")


@dataclass(frozen=True)
class Toolchain:
    """nvrtc: module of cuda-bindings; version: (major, minor); build: tells builds of one version apart; roots: include roots, in
    order; cuda_include: the root of cuda.h and cuda_bf16.h among them."""

    nvrtc: object
    version: tuple[int, int]
    build: int
    roots: tuple[Path, ...]
    cuda_include: Path

    @property
    def identity(self) -> str:
        """What decides the code besides sources and flags, as it enters the key."""
        return f"nvrtc {self.version[0]}.{self.version[1]} {self.build}"


@dataclass(frozen=True)
class Compiled:
    """cubin; log: what NVRTC and ptxas said (registers, spills, shared memory); seconds of compilation."""

    cubin: bytes
    log: str
    seconds: float


def _load_nvrtc():
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise BackendUnavailable(f"cuda-bindings is not installed ({error}): pip install 'cuda-bindings>=13.0.3,<14'") from error
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-bindings raises its own kinds, by version, when libnvrtc cannot be found
        raise BackendUnavailable(
            f"NVRTC, the CUDA run-time compiler, is not installed ({error}): pip install 'nvidia-cuda-nvrtc>=13,<14'"
        ) from error
    if int(status):
        raise BackendUnavailable(f"nvrtcVersion failed: {status}")
    return nvrtc, (major, minor)


def _library_path() -> Path | None:
    """The libnvrtc in use."""
    try:
        from cuda import pathfinder

        path = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, AttributeError, RuntimeError):  # cuda-bindings found it by other means: then only the version tells builds apart
        return None
    return Path(path).resolve() if path else None


def _cuda_version(directory: Path) -> int | None:
    """CUDA major version of the headers in `directory`; None when there are none."""
    try:
        match = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", (directory / "cuda.h").read_text(errors="replace"))
    except OSError:
        return None
    return int(match[1]) // 1000 if match else None


def _find_cudart_headers() -> str | None:
    try:
        from cuda import pathfinder

        return pathfinder.find_nvidia_header_directory("cudart")
    except (ImportError, AttributeError, RuntimeError):  # no cuda-pathfinder, or one too old to know headers: other places remain
        return None


def _cuda_include(version: tuple[int, int], library: Path | None) -> Path:
    candidates: list[Path] = []
    if library is not None:
        candidates.append(library.parent.parent / "include")  # nvidia/cu13/{lib,include}, and a toolkit's lib64
    found = _find_cudart_headers()
    if found:
        candidates.append(Path(found))
    candidates += [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates.append(Path("/usr/local/cuda/include"))
    versions = {directory: _cuda_version(directory) for directory in candidates}
    for directory, major in versions.items():
        if major == version[0]:
            return directory
    seen = [f"{directory} (CUDA {major})" for directory, major in versions.items() if major]
    raise BackendUnavailable(
        f"no CUDA {version[0]} headers (cuda_bf16.h, cuda_runtime.h) for NVRTC {version[0]}.{version[1]}; "
        f"found: {', '.join(seen) or 'none'}: pip install 'nvidia-cuda-runtime=={version[0]}.*', or set CUDA_HOME"
    )


@functools.cache
def toolchain() -> Toolchain:
    """The compiler and headers of this machine; BackendUnavailable says what is missing and how to get it."""
    nvrtc, version = _load_nvrtc()
    library = _library_path()
    cuda = _cuda_include(version, library)
    roots = [headers.PACKAGE / "include", *headers.third_party_roots(), cuda]
    if (cuda / "cccl").is_dir():
        roots.append(cuda / "cccl")
    return Toolchain(nvrtc, version, library.stat().st_size if library else 0, tuple(roots), cuda)


def flags(arch: str) -> tuple[str, ...]:
    """Compiler options that decide the code; include paths are added at the call and enter the key as contents."""
    return (f"-arch={arch}", *_FLAGS)


def make_key(spec: KernelSpec, headers_digest: str, toolchain: str) -> str:
    """Name of a cubin: generated source, headers, flags, compiler. Equal on every machine where these are equal."""
    state = hashlib.sha256()
    for part in (spec.source, headers_digest, *flags(spec.arch), toolchain):
        state.update(part.encode() + b"\0")
    return state.hexdigest()


def key(spec: KernelSpec) -> str:
    """Name of the kernel's cubin in the disk cache: by the headers that it reaches, and this machine's compiler."""
    tools = toolchain()
    return make_key(spec, headers.closure_digest(spec.header, tools.roots), tools.identity)


def _check(nvrtc, result: Sequence) -> object:
    if int(result[0]):
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result[0])[1].decode()}")
    return result[1] if len(result) > 1 else None


def _text(nvrtc, program) -> str:
    size = _check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
    buffer = bytes(size)
    _check(nvrtc, nvrtc.nvrtcGetProgramLog(program, buffer))
    return buffer.rstrip(b"\0").decode(errors="replace")


def compile_spec(spec: KernelSpec) -> Compiled:
    """Compiles, without any cache. Raises CompileError with the offending source lines."""
    tools = toolchain()
    nvrtc = tools.nvrtc
    options = [*flags(spec.arch), *(f"-I{root}" for root in tools.roots)]
    shims = [text.encode() for text in headers.SHIMS.values()]
    names = [name.encode() for name in headers.SHIMS]
    program = _check(nvrtc, nvrtc.nvrtcCreateProgram(spec.source.encode(), f"{spec.name}.cu".encode(), len(shims), shims, names))
    begin = time.perf_counter()
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _text(nvrtc, program)
        if int(status):
            raise CompileError(_explain(spec, nvrtc.nvrtcGetErrorString(status)[1].decode(), log))
        cubin = bytes(_check(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return Compiled(cubin, log, time.perf_counter() - begin)


_ERROR_PLACE = re.compile(r"^(.+?)\((\d+)\): (?:catastrophic )?error\b", re.MULTILINE)


def _excerpt(spec: KernelSpec, file: str, line: int, context: int = 2) -> str:
    """The lines around `line`, with numbers and a mark."""
    try:
        text = spec.source if file == f"{spec.name}.cu" else headers.SHIMS.get(file) or Path(file).read_text(errors="replace")
    except OSError:
        return f"{file}:{line}"
    lines = text.splitlines()
    first, last = max(1, line - context), min(len(lines), line + context)
    shown = (f"{'>' if number == line else ' '} {number:5d} | {lines[number - 1]}" for number in range(first, last + 1))
    return "\n".join([f"{file}:{line}", *shown])


def _explain(spec: KernelSpec, status: str, log: str, max_places: int = 3, max_log: int = 16000) -> str:
    places = list(dict.fromkeys((file, int(line)) for file, line in _ERROR_PLACE.findall(log)))[:max_places]
    parts = [f"{status}: kernel {spec} does not compile", f"flags: {' '.join(flags(spec.arch))}\ncache: {environment.text('DG_CACHE_DIR')}"]
    parts += [_excerpt(spec, file, line) for file, line in places]
    parts.append("compiler output:\n" + (log if len(log) <= max_log else log[:max_log] + "\n[cut]"))
    return "\n\n".join(parts)
