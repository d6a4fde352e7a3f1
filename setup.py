"""Build steps that pyproject.toml cannot state: the pinned headers, and the host extension on Python's stable ABI."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

PROJECT = Path(__file__).resolve().parent


def fetch_headers() -> None:
    """Makes deep_gemm/include/third_party current. By path: the project is not importable while it is being built."""
    spec = importlib.util.spec_from_file_location("fetch_headers", PROJECT / "scripts" / "fetch_headers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.fetch()


class BuildPy(build_py):
    def run(self) -> None:
        fetch_headers()
        # setuptools lists package data while it writes the metadata, before the headers of a fresh checkout exist: list again.
        self.__dict__.pop("data_files", None)
        # Files that an earlier build left in build/ and the source no longer has would ship.
        shutil.rmtree(Path(self.build_lib) / "deep_gemm", ignore_errors=True)
        super().run()


class BuildExt(build_ext):
    def run(self) -> None:
        fetch_headers()  # an in-place build of the extension alone must leave a source tree that can compile kernels
        super().run()

    def build_extensions(self) -> None:
        # A Python built from source adds its own library folders to every link. The extension needs nothing of them, and with them its
        # bytes would depend on the machine.
        linker = [option for option in self.compiler.linker_so if not option.startswith(("-L", "-Wl,-rpath"))]
        self.compiler.set_executable("linker_so", linker)
        super().build_extensions()


def relative(paths: list[Path]) -> list[str]:
    return sorted(str(path.relative_to(PROJECT)) for path in paths)


INCLUDE = PROJECT / "deep_gemm" / "include"
SHARED_HEADERS = [*(INCLUDE / "deep_gemm" / "layout").glob("*.h"), *(INCLUDE / "deep_gemm" / "schedule").glob("*.h")]

setup(
    ext_modules=[
        Extension(
            "deep_gemm._C",
            sources=relative([*(PROJECT / "csrc").glob("*.c")]),
            depends=relative([*(PROJECT / "csrc").glob("*.h"), *SHARED_HEADERS]),
            include_dirs=["deep_gemm/include", "csrc"],
            define_macros=[("Py_LIMITED_API", "0x030A0000")],
            # -g0, -s: debug information holds the paths of the build, and two builds of one commit give the same bytes.
            extra_compile_args=["-std=c11", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-missing-field-initializers"],
            extra_link_args=["-Wl,-s"],
            py_limited_api=True,
        )
    ],
    cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
    # One wheel for every Python from 3.10 on: the extension uses nothing but the stable ABI.
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
