"""Compiles the kernels of mega/staged for the SIMT machine (simt.h) and launches them: a stand-in for `kernels.Launcher` without a GPU."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

from deep_gemm import _C
from deep_gemm.jit import CppType
from deep_gemm.mega.staged.kernels import KERNELS

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parents[1] / "deep_gemm" / "include" / "deep_gemm"
ROOMS = ("comm", "epilogue/vector.cuh", "epilogue/swiglu.cuh", "kernels", "layout")


def _copy_headers(to: Path) -> None:
    """The project's headers, dynamic shared memory turned into a pointer (C++ has no such declaration)."""
    for room in ROOMS:
        for path in [INCLUDE / room] if room.endswith(".cuh") else sorted((INCLUDE / room).glob("*")):
            if path.suffix not in (".h", ".cuh") or path.name.startswith("sm"):
                continue
            target = to / "deep_gemm" / path.relative_to(INCLUDE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(re.sub(r"extern __shared__ int (\w+)\[\];", r"int* \1 = simt::dynamic_smem<int>();", path.read_text()))


def _source() -> str:
    headers = {kernel.header for kernel in KERNELS.values()}
    lines = [
        "#include <simt.h>",
        "#include <cuda_bf16.h>",
        *(f"#include <deep_gemm/kernels/mega_moe_{name}.cuh>" for name in sorted(headers)),
    ]
    for name, kernel in KERNELS.items():
        members = [f"static constexpr int kThreads = {kernel.threads};"]
        members += [f"using {key} = {value.name};" for key, value in kernel.config.items() if isinstance(value, CppType)]
        lines += [
            f"struct Config_{name} {{ {' '.join(members)} }};",
            f'extern "C" void run_{name}(const void* raw, unsigned x, unsigned y, size_t dynamic_bytes, int reversed) {{',
            f"  {kernel.params} params; std::memcpy(&params, raw, sizeof(params));",
            f"  simt::launch([&] {{ deep_gemm::kernels::mega_moe_{kernel.entry}<Config_{name}>(params); }}, {{x, y, 1}}, {kernel.threads}, dynamic_bytes, reversed);",
            "}",
        ]
    return "\n".join(lines) + "\n"


def compile_machine(folder: Path, compiler: str) -> ctypes.CDLL:
    """The kernels as a shared library in `folder`."""
    _copy_headers(folder / "include")
    (folder / "kernels.cpp").write_text(_source())
    library = folder / "kernels.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-I{HERE / 'shim'}", f"-I{HERE}", f"-I{folder / 'include'}"]
    subprocess.run([*command, str(folder / "kernels.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class SimtLauncher:
    """Like kernels.Launcher. reversed: threads and CTAs run in the opposite order."""

    def __init__(self, library: ctypes.CDLL, *, reversed: bool = False):
        self._library, self._reversed = library, reversed

    def __call__(self, name: str, grid: int | tuple[int, ...], stream: int, *, smem_bytes: int = 0, **fields: object) -> None:
        x, y = (grid, 1) if isinstance(grid, int) else grid
        params = _C.pack(KERNELS[name].params, **fields)
        getattr(self._library, f"run_{name}")(params, x, y, ctypes.c_size_t(smem_bytes), int(self._reversed))
