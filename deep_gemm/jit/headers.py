"""Where headers are, and the digest of all those that a kernel can reach.

The digest follows `#include` lines without evaluating conditions, so it covers more files than the compiler opens and never fewer
(tests/test_jit.py compiles from the covered files alone). Contents, and paths relative to an include root, enter it; the place of a root
does not."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import BackendUnavailable

PACKAGE = Path(__file__).resolve().parent.parent

# Names that NVRTC has no header for. <cstdint> comes without libcu++, whose headers alone would cost a small kernel 0.4 s.
_STDINT = """#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t; typedef unsigned long uint64_t;
typedef long intptr_t; typedef unsigned long uintptr_t;
"""
SHIMS = {
    "deep_gemm_prelude.h": """#pragma once
namespace std {}  // CUTLASS writes `using namespace std`-like names in places that NVRTC compiles
struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };
""",
    "stdint.h": _STDINT,
    "cstdint": _STDINT + "namespace std { using ::uint8_t; using ::uint16_t; using ::uint32_t; using ::uint64_t; using ::uintptr_t;\n"
    "using ::int8_t; using ::int16_t; using ::int32_t; using ::int64_t; using ::intptr_t; }\n",
}

# CUTLASS names libcu++ headers through a macro whose value depends on the CUDA version: both readings are followed.
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:CUDA_STD_HEADER\((\w+)\)|[<"]([^>"\n]+)[>"])', re.MULTILINE)
_FETCHED = {"cute", "cutlass", "cuda"}  # first parts of include paths that scripts/fetch_headers.py provides


def third_party_roots() -> list[Path]:
    """Existing include roots below deep_gemm/include/third_party (CUTLASS, CCCL), which the build fills."""
    base = PACKAGE / "include" / "third_party"
    return [path for path in (base / "cutlass", base, base / "cccl") if path.is_dir()]


@functools.cache
def _read(path: str) -> tuple[bytes, tuple[str, ...]] | None:
    """(sha256 of the file, names it includes), or None when there is no such file."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    return hashlib.sha256(data).digest(), tuple(_included(data))


def _included(data: bytes) -> Iterator[str]:
    for macro, name in _INCLUDE.findall(data):
        if macro:
            yield f"cccl/cuda/std/{macro.decode()}"
            yield f"cuda/std/{macro.decode()}"
        else:
            yield name.decode()


def _combined(digests: Mapping[str, bytes]) -> bytes:
    """One digest over names and contents, whatever their order."""
    state = hashlib.sha256()
    for name in sorted(digests):
        state.update(name.encode() + b"\0" + digests[name])
    return state.digest()


def _shim_digests() -> dict[str, bytes]:
    return {name: hashlib.sha256(text.encode()).digest() for name, text in SHIMS.items()}


class Closure:
    """Every header reachable from the header `start`. `files`: relative path -> absolute path; `missing`: names found in no root (mostly
    host headers behind conditions)."""

    def __init__(self, start: str, roots: Sequence[Path]):
        self.files: dict[str, str] = {}
        self.missing: set[str] = set()
        self._digests: dict[str, bytes] = {}
        todo: list[tuple[str, tuple[str, str] | None]] = [(start, None)]
        while todo:
            name, here = todo.pop()
            found = None if name in SHIMS else self._find(name, here, roots)
            if found is None:
                self.missing.add(name)
                continue
            root, relative = found
            if relative in self.files:
                continue
            path = os.path.join(root, relative)
            digest, names = _read(path)
            self.files[relative], self._digests[relative] = path, digest
            todo += [(included, (root, os.path.dirname(relative))) for included in names]
        self.missing -= SHIMS.keys()

    @staticmethod
    def _find(name: str, here: tuple[str, str] | None, roots: Sequence[Path]) -> tuple[str, str] | None:
        if here is not None:  # beside the file that includes it, as for quotes; for < > this only covers more
            relative = os.path.normpath(os.path.join(here[1], name))
            if _read(os.path.join(here[0], relative)):
                return here[0], relative
        for root in roots:
            if _read(os.path.join(root, name)):
                return str(root), os.path.normpath(name)
        return None

    def digest(self) -> bytes:
        return _combined(self._digests | _shim_digests())

    def outside(self, folder: Path) -> dict[str, bytes]:
        """Relative path -> digest of the headers that are not below `folder`."""
        return {relative: self._digests[relative] for relative, path in self.files.items() if not Path(path).is_relative_to(folder)}

    def check_complete(self, roots: Sequence[Path]) -> None:
        """Raises BackendUnavailable when a whole third-party tree that the kernel needs is absent."""
        absent = sorted({name.split("/")[0] for name in self.missing} & _FETCHED)
        absent = [part for part in absent if not any((root / part).is_dir() for root in roots)]
        if absent:
            where = PACKAGE / "include" / "third_party"
            raise BackendUnavailable(
                f"the headers <{'/...>, <'.join(absent)}/...> that the kernels need are not in {where}: run "
                "`python scripts/fetch_headers.py` in the source checkout, or reinstall the deep-gemm wheel, which carries them"
            )


@functools.cache
def closure_digest(start: str, roots: tuple[Path, ...]) -> str:
    """Digest of what `start` reaches. Read once per process: about 0.1 s for the first header that reaches CUTLASS, 0.01 s for the next."""
    closure = Closure(start, roots)
    closure.check_complete(roots)
    return closure.digest().hex()


@functools.cache
def package_digest() -> str:
    """Digest of every header that came with the package. Read once per process: 7 MB, about 0.02 s; it follows no includes."""
    root = PACKAGE / "include"
    found = _shim_digests()
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, root)] = hashlib.sha256(file.read()).digest()
    return _combined(found).hex()


def outside_digest(starts: Iterable[str], roots: Sequence[Path]) -> str:
    """Digest of the headers that `starts` reach outside the package: CUDA's."""
    found: dict[str, bytes] = {}
    for start in starts:
        found |= Closure(start, roots).outside(PACKAGE)
    return _combined(found).hex()


def clear_memo() -> None:
    """Forget what was read: for headers edited while the process runs."""
    package_digest.cache_clear()
    closure_digest.cache_clear()
    _read.cache_clear()
