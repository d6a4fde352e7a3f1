"""The kernel pack: cubins that came with the wheel, looked up before the disk cache; a hit needs neither NVRTC nor CUDA headers.

`kernel_pack/manifest.json` names the compiler that made the cubins, and `<key>.cubin` are they, each with its SHA-256 in the manifest. A key of
the pack is made like a key of the disk cache, from what this process has: generated source, flags and architecture; of the pack come the
compiler's identity, which this machine need not have, and of the headers the digest of the whole package's tree. So a pack of other headers,
other flags or another release has no key that matches. A source checkout has no pack."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._version import __version__
from . import cache, compiler, driver, headers
from .cache import Entry
from .spec import KernelSpec

FORMAT = 1
FOLDER = headers.PACKAGE / "kernel_pack"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Pack:
    """toolchain: what compiled the cubins (enters the keys); cuda_major: of that compiler; sha256: key -> digest of the file."""

    folder: Path
    toolchain: str
    cuda_major: int
    sha256: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class State:
    """pack: what the folder holds, None when it is no pack for this package; reason: why nothing is loaded from it, None when it is in use."""

    pack: Pack | None
    reason: str | None


def _open(folder: Path) -> State:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] != FORMAT:
            return State(None, f"{path} has format {manifest['format']}, expected {FORMAT}")
        if manifest["package"] != __version__:
            return State(None, f"{path} was made for deep_gemm {manifest['package']}, this is {__version__}")
        sha256 = {key: kernel["sha256"] for key, kernel in manifest["kernels"].items()}
        pack, digest = Pack(folder, manifest["toolchain"], int(manifest["cuda_major"]), sha256), manifest["headers"]
    except FileNotFoundError:
        return State(None, "this package came without one (a source checkout, or a wheel built without it)")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        cache.warn_once(f"the kernel pack is not used: {path} is damaged ({error!r}); reinstall the deep-gemm wheel")
        return State(None, f"{path} is damaged ({error!r})")
    if digest != headers.package_digest():
        return State(pack, f"the headers in {headers.PACKAGE / 'include'} are not those it was made from")
    version = driver.cuda_version()
    if version is not None and version[0] < pack.cuda_major:
        return State(pack, f"it was made for CUDA {pack.cuda_major}, the driver supports CUDA {version[0]}.{version[1]}")
    return State(pack, None)


@functools.cache
def state() -> State:
    """The pack of this package; read once per process."""
    return _open(FOLDER)


def _key(spec: KernelSpec, toolchain: str) -> str:
    return compiler.make_key(spec, headers.package_digest(), toolchain)


def _read(pack: Pack, key: str) -> bytes | None:
    try:
        cubin = (pack.folder / f"{key}.cubin").read_bytes()
    except OSError:
        cubin = b""
    if hashlib.sha256(cubin).hexdigest() == pack.sha256[key]:
        return cubin
    cache.counters["corrupted"] += 1
    # One warning for the folder: where one file is damaged, others often are.
    cache.warn_once(f"files are missing or damaged in {pack.folder}: their kernels are compiled instead; reinstall the deep-gemm wheel")
    return None


def find(spec: KernelSpec) -> Entry | None:
    """The kernel's cubin; None when there is no usable pack, it lacks the kernel, or the file is damaged (one warning)."""
    pack, reason = state().pack, state().reason
    if pack is None or reason is not None:
        return None
    key = _key(spec, pack.toolchain)
    cubin = _read(pack, key) if key in pack.sha256 else None
    return None if cubin is None else Entry(key, cubin, "pack", pack.folder / f"{key}.cubin")


def status() -> dict[str, Any]:
    """For jit.status(): dir, entries, toolchain and cuda_major (None without a pack), usable, reason (None when usable), hits."""
    pack, reason = state().pack, state().reason
    return {
        "dir": str(FOLDER),
        "entries": len(pack.sha256) if pack else 0,
        "toolchain": pack.toolchain if pack else None,
        "cuda_major": pack.cuda_major if pack else None,
        "usable": pack is not None and reason is None,
        "reason": reason,
        "hits": cache.counters["hits_pack"],
    }


def clear_memo() -> None:
    """Forget the pack that was read."""
    state.cache_clear()


def write(folder: Path, cubins: Mapping[KernelSpec, bytes]) -> None:
    """Makes a pack in the empty or missing `folder` from cubins that this process's compiler and headers made.

    Same specs, headers and compiler: the same bytes in every file."""
    tools = compiler.toolchain()
    cuda_headers = headers.outside_digest(sorted({spec.header for spec in cubins}), tools.roots)
    toolchain = f"{tools.identity}, CUDA headers {cuda_headers}"
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"folder = {folder}: not empty, expected an empty or missing folder")
    kernels = {}
    for spec, cubin in cubins.items():
        key = _key(spec, toolchain)
        (folder / f"{key}.cubin").write_bytes(cubin)
        kernels[key] = {"sha256": hashlib.sha256(cubin).hexdigest(), "kernel": str(spec)}
    manifest = {
        "format": FORMAT,
        "package": __version__,
        "toolchain": toolchain,
        "cuda_major": tools.version[0],
        "headers": headers.package_digest(),
        "archs": sorted({spec.arch for spec in cubins}),
        "kernels": kernels,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
