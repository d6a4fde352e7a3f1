"""What a release wheel must be: the checks of scripts/build_wheels, which need no machine of the wheel's architecture.

python scripts/audit_wheel.py WHEEL...
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from io import BytesIO
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

MAX_BYTES = 12_000_000
GLIBC = (2, 17)
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
# Arm kernels may have pages of 64 kB (GH200 and GB200 hosts do): segments that are aligned to less cannot be loaded there.
MIN_ALIGNMENT = {"x86_64": 1 << 12, "aarch64": 1 << 16}
LICENCES = {
    "dist-info/licenses/LICENSE": "MIT License",
    "deep_gemm/include/third_party/cutlass/LICENSE": "Redistribution and use in source and binary forms",
    "deep_gemm/include/third_party/cccl/LICENSE": "LLVM Exceptions",
}
# Asks the compiler of another architecture whether pyconfig.h, written for this one, tells the truth there. The rest of it says which
# functions libc has, and the headers of the limited API ask for none.
HEADER_CHECK = """#include <Python.h>
#include <wchar.h>
_Static_assert(SIZEOF_VOID_P == sizeof(void *) && SIZEOF_SIZE_T == sizeof(size_t) && SIZEOF_LONG == sizeof(long), "sizes of words");
_Static_assert(SIZEOF_INT == sizeof(int) && SIZEOF_SHORT == sizeof(short) && SIZEOF_LONG_LONG == sizeof(long long), "sizes of integers");
_Static_assert(SIZEOF_WCHAR_T == sizeof(wchar_t) && SIZEOF_DOUBLE == sizeof(double), "sizes of other types");
_Static_assert(sizeof(Py_ssize_t) == sizeof(void *) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "order of bytes");
#ifdef WORDS_BIGENDIAN
#error "pyconfig.h is for a big-endian machine"
#endif
"""


class AuditError(RuntimeError):
    """A wheel that may not be released; says which and why."""


def check_headers(compiler: Path, folder: Path) -> None:
    """Raises AuditError unless this Python's headers fit the architecture that `compiler` compiles for."""
    source = folder / "header_check.c"
    source.write_text("#define Py_LIMITED_API 0x030A0000\n" + HEADER_CHECK)
    command = [str(compiler), "-std=c11", "-c", f"-I{sysconfig.get_path('include')}", str(source), "-o", str(source.with_suffix(".o"))]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise AuditError(f"the headers of this Python do not fit the target of {compiler}:\n{result.stderr}")


def check_extension(name: str, data: bytes, architecture: str) -> None:
    """Machine, alignment, libraries, versions of glibc's symbols and search paths of the shared object."""
    elf = ELFFile(BytesIO(data))
    faults = []
    if elf["e_machine"] != MACHINES[architecture]:
        faults.append(f"machine {elf['e_machine']}, expected {MACHINES[architecture]}")
    alignments = [segment["p_align"] for segment in elf.iter_segments("PT_LOAD")]
    if min(alignments) < MIN_ALIGNMENT[architecture]:
        faults.append(f"segments aligned to {min(alignments)}, expected {MIN_ALIGNMENT[architecture]} at least")
    tags = [tag for segment in elf.iter_segments("PT_DYNAMIC") for tag in segment.iter_tags()]
    needed = {tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"}
    # The loader is part of glibc; on aarch64 it holds the stack protector's guard, which Debian's Python has extensions compiled with.
    if not needed <= {"libc.so.6", "libpthread.so.0", f"ld-linux-{architecture}.so.1"}:
        faults.append(f"needs {sorted(needed)}, expected libc alone")
    if any(tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH") for tag in tags):
        faults.append("has a library search path, expected none")
    versions = {
        auxiliary.name
        for section in elf.iter_sections() if isinstance(section, GNUVerNeedSection)
        for _, auxiliaries in section.iter_versions() for auxiliary in auxiliaries
    }  # fmt: skip
    newer = sorted(version for version in versions if not _is_old_glibc(version))
    if newer:
        faults.append(f"needs symbols of {newer}, expected GLIBC_{GLIBC[0]}.{GLIBC[1]} at most")
    if faults:
        raise AuditError(f"{name}: {'; '.join(faults)}")


def _is_old_glibc(version: str) -> bool:
    match = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version)
    return match is not None and (int(match[1]), int(match[2])) <= GLIBC


def check_contents(wheel: Path) -> None:
    """Name, size, licences, pack and extension."""
    name = re.fullmatch(r"deep_gemm-[^-]+-cp310-abi3-(?:\w+\.)*manylinux_2_17_(x86_64|aarch64)(?:\.\w+)*\.whl", wheel.name)
    if name is None:
        raise AuditError(f"{wheel.name}: expected deep_gemm-<version>-cp310-abi3-manylinux_2_17_<x86_64 or aarch64>.whl")
    if wheel.stat().st_size > MAX_BYTES:
        raise AuditError(f"{wheel.name}: {wheel.stat().st_size} bytes, expected {MAX_BYTES} at most")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for ending, phrase in LICENCES.items():
            found = [path for path in names if path.endswith(ending)]
            if len(found) != 1 or phrase not in archive.read(found[0]).decode():
                raise AuditError(f"{wheel.name}: no licence {ending} with the words {phrase!r}")
        if not any(path.endswith("kernel_pack/manifest.json") for path in names):
            raise AuditError(f"{wheel.name}: has no kernel pack")
        extensions = [path for path in names if path.endswith(".so")]
        if extensions != ["deep_gemm/_C.abi3.so"]:
            raise AuditError(f"{wheel.name}: shared objects {extensions}, expected deep_gemm/_C.abi3.so alone")
        check_extension(f"{wheel.name}: {extensions[0]}", archive.read(extensions[0]), name[1])


def audit(wheel: Path) -> None:
    """All checks, those of auditwheel, abi3audit, twine and check-wheel-contents too. Raises AuditError."""
    check_contents(wheel)
    entry = Path(sys.executable).parent
    for command, expected in (
        (("auditwheel", "show"), '"manylinux_2_17_'),
        (("abi3audit", "--strict", "--verbose"), "0 ABI version mismatches and 0 ABI violations"),
        (("twine", "check", "--strict"), "PASSED"),
        (("check-wheel-contents",), "OK"),
    ):
        result = subprocess.run(
            [str(entry / command[0]), *command[1:], str(wheel)], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode or expected not in " ".join(result.stdout.split()):  # these tools break lines at the terminal's width
            raise AuditError(f"{' '.join(command)} {wheel.name} (exit {result.returncode}), expected {expected!r}:\n{result.stdout}")
    print(f"{wheel.name}: audits passed, {wheel.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        audit(Path(argument))
