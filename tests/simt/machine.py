"""Kernels on the SIMT machine (simt.h): those of mega/staged (`compile_machine`, a stand-in for `kernels.Launcher`), and any `KernelSpec`
(`HopperKernel`, a stand-in for what `jit.load` gives)."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

from deep_gemm import _C
from deep_gemm.jit import CppType, KernelSpec
from deep_gemm.mega.staged.kernels import KERNELS

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parents[1] / "deep_gemm" / "include" / "deep_gemm"
FORWARD, REVERSED = 0, 1  # order of threads; any larger number seeds a random one

_progress = ctypes.c_uint64(0)  # of all launches of the process: while one goes on, another may wait for it


class SimtError(RuntimeError):
    """A launch could not end, or broke a rule of the machine. The message lists what each warp waits for."""


def copy_headers(to: Path, include: Path = INCLUDE) -> None:
    """The project's headers but ptx/, which the shims replace; dynamic shared memory becomes a pointer (C++ has no such declaration)."""
    for path in sorted(include.rglob("*")):
        relative = path.relative_to(include)
        if path.suffix not in (".h", ".cuh") or relative.parts[0] == "ptx":
            continue
        target = to / "deep_gemm" / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        text = re.sub(
            r"extern __shared__ (?:__align__\(\d+\) |alignas\(\d+\) )?(\w+) (\w+)\[\];",
            r"\1* const \2 = simt::dynamic_smem<\1>();",
            path.read_text(encoding="utf-8"),
        )
        target.write_text(text, encoding="utf-8")


_RUNNER = """
// {name}: runs `{call}` on every thread. Returns the length of the message, 0 when all went well.
extern "C" __attribute__((visibility("default")))
size_t run_{name}(const void* raw, const simt::LaunchArguments* arguments, char* message, size_t size) {{
  alignas({params}) unsigned char place[sizeof({params})];
  std::memcpy(place, raw, sizeof(place));
  const auto& params = *reinterpret_cast<const {params}*>(place);
  return simt::run_from_host(*arguments, {threads}, [&] {{ {call}; }}, message, size);
}}
"""


class _LaunchArguments(ctypes.Structure):
    """simt::LaunchArguments."""

    _fields_ = [
        ("x", ctypes.c_uint),
        ("y", ctypes.c_uint),
        ("cluster", ctypes.c_uint),
        ("resident", ctypes.c_int),
        ("smem_bytes", ctypes.c_uint64),
        ("order", ctypes.c_uint64),
        ("timeout_s", ctypes.c_double),
        ("progress", ctypes.POINTER(ctypes.c_uint64)),
    ]


def _compile(folder: Path, source: str) -> ctypes.CDLL:
    """A shared library of `source`, whose headers lie in folder/include."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.cpp").write_text(source, encoding="utf-8")
    library = folder / "kernels.so"
    flags = [
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        "-w",
        "-pthread",
        "-fno-strict-aliasing",
        "-fno-gnu-unique",
        "-fvisibility=hidden",
        "-U_FORTIFY_SOURCE",
    ]
    roots = [f"-I{path}" for path in (HERE / "shim", HERE, folder / "include")]
    made = subprocess.run(
        ["g++", *flags, *roots, str(folder / "kernels.cpp"), "-o", str(library)], check=False, capture_output=True, text=True
    )
    if made.returncode:
        raise RuntimeError(f"g++ could not compile {folder / 'kernels.cpp'}:\n{made.stderr[-6000:]}")
    return ctypes.CDLL(str(library))


def _launch(library: ctypes.CDLL, name: str, params: bytes, arguments: _LaunchArguments) -> None:
    arguments.progress = ctypes.pointer(_progress)
    message = ctypes.create_string_buffer(65536)
    run = getattr(library, f"run_{name}")
    run.restype = ctypes.c_size_t
    if run(params, ctypes.byref(arguments), message, ctypes.c_size_t(len(message))):
        raise SimtError(f"{name}: {message.value.decode()}")


class HopperKernel:
    """One kernel of the JIT, compiled for the machine into `folder`.

    include: the project's headers, or a changed copy of them.
    """

    def __init__(self, folder: Path, spec: KernelSpec, *, include: Path = INCLUDE):
        self.spec = spec
        copy_headers(folder / "include", include)
        runner = _RUNNER.format(name=spec.name, call=f"{spec.name}(params)", params=spec.params, threads=spec.threads)
        self._library = _compile(folder, '#include "hopper.h"\n' + spec.source + runner)

    def launch(self, params: bytes, grid, smem_bytes: int, stream: int = 0, cluster: int = 1, cooperative: bool = False, pdl: bool = False, *,
               resident: bool = True, order: int = FORWARD, timeout_s: float = 20.0) -> None:  # fmt: skip
        """Like the kernels of `jit`, and returns when the launch has ended. resident: all CTAs run at once, an OS thread per cluster."""
        x, y = (grid, 1) if isinstance(grid, int) else (*grid, 1)[:2]
        size = _C.struct_size(self.spec.params)
        if len(params) != size:
            raise ValueError(f"{self.spec.name}: params has {len(params)} bytes, expected {size}")
        _launch(self._library, self.spec.name, params, _LaunchArguments(x, y, cluster, resident, smem_bytes, order, timeout_s))


# ---- the kernels of mega/staged ------------------------------------------------------------------------------------------------------


def _staged_source() -> str:
    headers = {kernel.header for kernel in KERNELS.values()}
    lines = [
        "#include <simt.h>",
        "#include <cuda_bf16.h>",
        *(f"#include <deep_gemm/kernels/mega_moe_{name}.cuh>" for name in sorted(headers)),
    ]
    for name, kernel in KERNELS.items():
        members = [f"static constexpr int kThreads = {kernel.threads};"]
        members += [f"using {key} = {value.name};" for key, value in kernel.config.items() if isinstance(value, CppType)]
        call = f"deep_gemm::kernels::mega_moe_{kernel.entry}<Config_{name}>(params)"
        lines.append(f"struct Config_{name} {{ {' '.join(members)} }};")
        lines.append(_RUNNER.format(name=name, call=call, params=kernel.params, threads=kernel.threads))
    return "\n".join(lines) + "\n"


def compile_machine(folder: Path) -> ctypes.CDLL:
    """The kernels of mega/staged as a shared library in `folder`."""
    copy_headers(folder / "include")
    return _compile(folder, _staged_source())


class SimtLauncher:
    """Like kernels.Launcher. reversed: threads and CTAs run in the opposite order."""

    def __init__(self, library: ctypes.CDLL, *, reversed: bool = False):
        self._library, self._order = library, REVERSED if reversed else FORWARD

    def __call__(self, name: str, grid: int | tuple[int, ...], stream: int, *, smem_bytes: int = 0, **fields: object) -> None:
        x, y = (grid, 1) if isinstance(grid, int) else grid
        params = _C.pack(KERNELS[name].params, **fields)
        # The kernels that wait for peers give up by themselves.
        _launch(self._library, name, params, _LaunchArguments(x, y, 1, False, smem_bytes, self._order, 120.0))
