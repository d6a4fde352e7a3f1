"""Kernels compiled at run time.

spec.py      KernelSpec: template, Config values, architecture -> source text
headers.py   include roots, shims, digest of all reachable headers
compiler.py  NVRTC: source -> cubin, key, error text
cache.py     cubins on disk: locks, atomic writes, digests
pack.py      cubins that came with the wheel: manifest, look-up, writing a pack
driver.py    CUDA driver: entry points for the extension, contexts
loader.py    cubin -> kernel on a device, launch
warmup.py    many specs at once, in parallel processes (worker.py is such a process)
shipped.py   all specs in use, from their providers

Nothing here happens at import; no GPU, driver or compiler is needed to import it."""

from __future__ import annotations

from typing import Any

from ..errors import BackendUnavailable
from . import cache, compiler, headers, loader, pack
from .driver import device_arch
from .loader import LoadedKernel, build, load
from .shipped import register_shipped, shipped_specs
from .spec import CppType, KernelSpec
from .warmup import WarmupReport, warmup

__all__ = [
    "CppType",
    "KernelSpec",
    "LoadedKernel",
    "WarmupReport",
    "build",
    "clear",
    "device_arch",
    "load",
    "register_shipped",
    "shipped_specs",
    "status",
    "warmup",
]


def status() -> dict[str, Any]:
    """Where kernels come from in this process, for a bug report.

    cache_dir, cache_writable; pack: {dir, entries, toolchain, cuda_major, usable, reason (why not usable), hits}; hits_memory, hits_pack,
    hits_disk, misses (compilations), corrupted (files refused), compile_seconds; nvrtc: its version, None where there is none or no headers
    for it, and nvrtc_missing says what to install; include_roots; loaded: kernels on devices."""
    tools, missing = None, None
    try:
        tools = compiler.toolchain()
    except BackendUnavailable as error:
        missing = str(error)
    counted = {name: cache.counters[name] for name in ("hits_memory", "hits_pack", "hits_disk", "misses", "corrupted", "compile_seconds")}
    return {
        "cache_dir": str(cache.directory()),
        "cache_writable": cache.writable(),
        "pack": pack.status(),
        **counted,
        "nvrtc": f"{tools.version[0]}.{tools.version[1]}" if tools else None,
        "nvrtc_missing": missing,
        "include_roots": [str(root) for root in tools.roots] if tools else [],
        "loaded": loader.count(),
    }


def clear() -> None:
    """Empties the disk cache and forgets loaded kernels and header contents: the next `load` compiles from the headers as they are now."""
    cache.clear()
    loader.forget()
    headers.clear_memo()
    pack.clear_memo()
