"""Kernels compiled at run time.

spec.py      KernelSpec: template, Config values, architecture -> source text
headers.py   include roots, shims, digest of all reachable headers
compiler.py  NVRTC: source -> cubin, key, error text
cache.py     cubins on disk: locks, atomic writes, digests, the read-only pack
driver.py    CUDA driver: entry points for the extension, contexts
loader.py    cubin -> kernel on a device, launch
warmup.py    many specs at once, in parallel processes (worker.py is such a process)
shipped.py   all specs in use, from their providers

Nothing here happens at import; no GPU, driver or compiler is needed to import it."""

from __future__ import annotations

from typing import Any

from . import cache, compiler, headers, loader
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
    """Where kernels come from in this process, for a bug report. Raises BackendUnavailable when there is no compiler.

    cache_dir, cache_writable, pack_dir (None: no pack came with the package); hits_memory, hits_pack, hits_disk, misses (compilations),
    corrupted (files refused), compile_seconds; nvrtc: its version; include_roots; loaded: kernels on devices."""
    tools = compiler.toolchain()
    counted = {name: cache.counters[name] for name in ("hits_memory", "hits_pack", "hits_disk", "misses", "corrupted", "compile_seconds")}
    return {
        "cache_dir": str(cache.directory()),
        "cache_writable": cache.writable(),
        "pack_dir": str(cache.PACK) if cache.PACK.is_dir() else None,
        **counted,
        "nvrtc": f"{tools.version[0]}.{tools.version[1]}",
        "include_roots": [str(root) for root in tools.roots],
        "loaded": loader.count(),
    }


def clear() -> None:
    """Empties the disk cache and forgets loaded kernels and header contents: the next `load` compiles from the headers as they are now."""
    cache.clear()
    loader.forget()
    headers.clear_memo()
