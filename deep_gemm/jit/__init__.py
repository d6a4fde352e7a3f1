"""Kernels compiled at run time.

spec.py      KernelSpec: template, Config values, architecture -> source text
headers.py   include roots, shims, digest of all reachable headers
compiler.py  NVRTC: source -> cubin, key, error text
cache.py     cubins on disk: locks, atomic writes, digests, the read-only pack
driver.py    CUDA driver: entry points for the extension, contexts
loader.py    cubin -> kernel on a device, launch
warmup.py    many specs at once, in parallel processes
shipped.py   all specs in use, from their providers

Nothing here happens at import; no GPU, driver or compiler is needed to import it."""

from __future__ import annotations

from .driver import device_arch
from .loader import LoadedKernel, build, load
from .spec import CppType, KernelSpec

__all__ = ["CppType", "KernelSpec", "LoadedKernel", "build", "device_arch", "load"]
