"""Places the CUTLASS, CuTe and CCCL headers that the kernels include, with their licences, in deep_gemm/include/third_party/.

The wheels are pinned by hash in third-party/requirements.txt and come through pip. Only the textual include closure of `ROOTS` is kept,
about a tenth of the files, so that the built wheel stays small. NVIDIA's CUDA runtime headers (cuda_bf16.h, ...) are proprietary and never
copied: at run time they come from nvidia-cuda-runtime, which torch requires.

    python scripts/fetch_headers.py [--destination DIR] [--wheels DIR] [--force]

DEEP_GEMM_HEADER_WHEELS=DIR in the environment is --wheels for every build, pip's included: no network then.

Layout (include roots: third_party/, third_party/cutlass/, third_party/cccl/):
    third_party/cutlass/{cute,cutlass}/...    third_party/cutlass/LICENSE
    third_party/cccl/{cuda,nv}/...            third_party/cccl/LICENSE
    third_party/PINS                          what the tree was made from; a tree with other pins is made anew
CUTLASS writes <cccl/cuda/std/x> for CUDA >= 13 and <cuda/std/x> before: both resolve to the same file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import posixpath
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
REQUIREMENTS = PROJECT / "third-party" / "requirements.txt"
DESTINATION = PROJECT / "deep_gemm" / "include" / "third_party"

# What kernels may include. A kernel that needs another header adds it here; the fetch notices the change by itself (PINS).
ROOTS = (
    *(f"cute/arch/{name}.hpp" for name in ("mma_sm90_gmma", "mma_sm90_desc", "copy_sm90_tma", "copy_sm90_desc", "cluster_sm90")),
    *(f"cute/arch/{name}.hpp" for name in ("mma_sm100_umma", "mma_sm100_desc", "copy_sm100", "copy_sm100_tma", "tmem_allocator_sm100")),
    *(f"cutlass/arch/{name}.h" for name in ("barrier", "reg_reconfig")),
    *(f"cuda/std/{name}" for name in ("cstdint", "type_traits", "utility", "array", "limits")),
)
# Named behind switches that NVRTC never sets (_LIBCUDACXX_HAS_SPACESHIP_OPERATOR, _LIBCUDACXX_HAS_STRING) and in no release of CCCL.
ABSENT = ("cuda/std/compare", "cuda/std/__compare/", "cuda/std/__type_traits/predicate_traits.h")
INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]+(?:[<"]([^>"\n]+)[>"]|CUDA_STD_HEADER\((\w+)\))', re.MULTILINE)
# Under NVRTC, CUTLASS 4.2 declares std::tuple_size and std::tuple_element as variadic templates. CCCL since 13.2 declares them itself, as
# the standard has them, and the two clash. CCCL before 13.3 comes without its licence text, so the redundant declarations go instead.
STD_TUPLE_DECLARATIONS = re.compile(
    rb"#if defined\(__CUDACC_RTC__\)\n"
    rb"template <class\.\.\. _Tp>\nstruct tuple_size;\n\n"
    rb"template <size_t _Ip, class\.\.\. _Tp>\nstruct tuple_element;\n"
    rb"#endif\n"
)
EDIT_NOTE = b"// deep_gemm: declarations of std::tuple_size and std::tuple_element removed here, CCCL has them.\n"


class Source(NamedTuple):
    """One pinned wheel: where its include root and its licence lie inside it, and the folders of headers it owns."""

    name: str
    wheel: str
    include: str
    licence: str
    folders: tuple[str, ...]


SOURCES = (
    Source(
        "cutlass",
        "nvidia_cutlass-",
        "cutlass_library/source/include/",
        "nvidia_cutlass-4.2.0.0.dist-info/licenses/LICENSE.txt",
        ("cute", "cutlass"),
    ),
    Source("cccl", "nvidia_cuda_cccl-", "nvidia/cu13/include/cccl/", "nvidia/cu13/cccl/LICENSE", ("cuda", "nv")),
)


def pins() -> str:
    """What decides the tree's contents: the pinned wheels and this file, as text."""
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    requirements = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    return "\n".join([*requirements, f"fetch_headers.py sha256:{script}", ""])


def is_current(destination: Path = DESTINATION) -> bool:
    """Whether the tree at `destination` was made from these pins by this file."""
    stamp = destination / "PINS"
    return stamp.is_file() and stamp.read_text() == pins()


def download(wheels: Path) -> None:
    """Fetches the pinned wheels with pip, which refuses any file whose hash differs."""
    # One platform for all machines: the files used are headers, and one hash then holds everywhere.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--platform=manylinux2014_x86_64", "--requirement", str(REQUIREMENTS), "--dest", str(wheels)]
    result = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise RuntimeError(
            f"pip could not fetch the pinned headers of {REQUIREMENTS} (exit {result.returncode}):\n{result.stdout}\n"
            "Needed: a package index that pip can reach, or both wheels in a folder named by DEEP_GEMM_HEADER_WHEELS."
        )


def open_wheel(source: Source, wheels: Path) -> zipfile.ZipFile:
    found = sorted(wheels.glob(f"{source.wheel}*.whl"))
    if len(found) != 1:
        raise RuntimeError(f"{wheels}: found {[path.name for path in found]}, expected one {source.wheel}*.whl")
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if f"sha256:{digest}" not in REQUIREMENTS.read_text():
        raise RuntimeError(f"{found[0].name}: sha256 is {digest}, which {REQUIREMENTS} does not list")
    return zipfile.ZipFile(found[0])


def included(text: bytes, includer: str) -> Iterator[tuple[str, ...]]:
    """For each #include of `text`: the names it may mean, in the preprocessor's order (beside the including file first)."""
    for name, std_header in INCLUDE.findall(text):
        target = name.decode() if name else f"cuda/std/{std_header.decode()}"
        yield posixpath.normpath(posixpath.join(posixpath.dirname(includer), target)), target.removeprefix("cccl/")


def closure(headers: dict[str, tuple[zipfile.ZipFile, str]], roots: Iterable[str] = ROOTS) -> dict[str, bytes]:
    """Name -> text of every header reachable from `roots`, through all branches of all conditionals.

    headers  include name -> (wheel, path in it)
    Raises   RuntimeError when a root, or a header that belongs to the sources, is in none of the wheels
    """
    owned = tuple(f"{folder}/" for source in SOURCES for folder in source.folders)
    kept: dict[str, bytes] = {}
    pending = [((root,), "the list of roots") for root in roots]
    while pending:
        names, includer = pending.pop()
        name = next((name for name in names if name in headers), None)
        if name is None:
            # Host and CUDA runtime headers stand behind conditionals or come from elsewhere; a missing one of ours would break kernels.
            if names[-1].startswith(owned) and not names[-1].startswith(ABSENT):
                raise RuntimeError(f"{includer} includes <{names[-1]}>, which is in none of the pinned wheels")
            continue
        if name not in kept:
            wheel, path = headers[name]
            kept[name] = wheel.read(path)
            pending += [(candidates, name) for candidates in included(kept[name], name)]
    return kept


def write_tree(wheels: Path, tree: Path) -> None:
    """Writes closure, licences and PINS into the empty folder `tree`."""
    opened = {source.name: open_wheel(source, wheels) for source in SOURCES}
    headers, owner = {}, {}
    for source in SOURCES:
        for path in opened[source.name].namelist():
            name = path.removeprefix(source.include)
            if path.startswith(source.include) and name.startswith(tuple(f"{folder}/" for folder in source.folders)):
                headers[name], owner[name] = (opened[source.name], path), source.name
    num_edits = 0
    for name, text in closure(headers).items():
        target = tree / owner[name] / name
        target.parent.mkdir(parents=True, exist_ok=True)
        text, edits = STD_TUPLE_DECLARATIONS.subn(EDIT_NOTE, text)
        num_edits += edits
        target.write_bytes(text)
    if num_edits == 0:
        raise RuntimeError("no header declares std::tuple_size for NVRTC any more: STD_TUPLE_DECLARATIONS is out of date with the pins")
    for source in SOURCES:
        (tree / source.name / "LICENSE").write_bytes(opened[source.name].read(source.licence))
        opened[source.name].close()
    (tree / "PINS").write_text(pins())


def fetch(destination: Path = DESTINATION, wheels: Path | None = None, force: bool = False) -> bool:
    """Makes `destination` current; True when it was rebuilt.

    wheels  a folder that holds the two pinned wheels already (checked by hash); None: DEEP_GEMM_HEADER_WHEELS, else pip fetches them
    """
    if is_current(destination) and not force:
        return False
    if wheels is None and os.environ.get("DEEP_GEMM_HEADER_WHEELS"):
        wheels = Path(os.environ["DEEP_GEMM_HEADER_WHEELS"])
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Made beside the destination and renamed, so that a killed or concurrent build never leaves half a tree that looks current.
    with tempfile.TemporaryDirectory(prefix=".headers-", dir=destination.parent) as scratch:
        if wheels is None:
            wheels = Path(scratch) / "wheels"
            download(wheels)
        tree = Path(scratch) / "tree"
        tree.mkdir()
        write_tree(wheels, tree)
        try:
            if destination.exists():
                os.rename(destination, Path(scratch) / "old")
            os.rename(tree, destination)
        except OSError:
            if not is_current(destination):  # else another build put the same tree there first
                raise
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--destination", type=Path, default=DESTINATION)
    parser.add_argument("--wheels", type=Path, help="folder with the pinned wheels; default: fetch them with pip")
    parser.add_argument("--force", action="store_true", help="rebuild a current tree too")
    options = parser.parse_args()
    rebuilt = fetch(options.destination, options.wheels, options.force)
    count = sum(path.is_file() for path in options.destination.rglob("*"))
    print(f"{options.destination}: {count} files, {'made' if rebuilt else 'already current'}")


if __name__ == "__main__":
    main()
