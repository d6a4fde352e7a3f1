"""Third-party headers (scripts/fetch_headers.py).

Exactly the include closure of the roots, from wheels whose hashes are pinned, with licences and without NVIDIA's runtime headers; the closure
alone compiles every root for Hopper and Blackwell."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
import zipfile

import pytest
from jit_helpers import REPOSITORY, echo_spec

from deep_gemm import jit

THIRD_PARTY = REPOSITORY / "deep_gemm" / "include" / "third_party"


@pytest.fixture(scope="module")
def headers():
    spec = importlib.util.spec_from_file_location("fetch_headers", REPOSITORY / "scripts" / "fetch_headers.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def index(tmp_path):
    """Makes a header index (name -> place in a wheel) from name -> text."""

    def make(files: dict[str, str]) -> dict[str, tuple[zipfile.ZipFile, str]]:
        path = tmp_path / "some.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for name, text in files.items():
                wheel.writestr(f"include/{name}", text)
        opened = zipfile.ZipFile(path)
        return {name: (opened, f"include/{name}") for name in files}

    return make


def test_closure_follows_every_form_of_include(headers, index):
    files = {
        "cute/root.hpp": "#if defined(NEVER)\n#  include <cute/behind_condition.hpp>\n#endif\n"
        '#include "beside.hpp"\n#include CUDA_STD_HEADER(array)\n',
        "cute/behind_condition.hpp": "// #include <cute/in_comment.hpp>\n",
        "cute/beside.hpp": "#include <cccl/cuda/std/utility>\n#include <cuda_bf16.h>\n#include <vector>\n",
        "cute/in_comment.hpp": "",
        "cute/unreached.hpp": "",
        "cuda/std/array": "",
        "cuda/std/utility": "#include <cuda/std/compare>\n",
    }
    kept = headers.closure(index(files), ["cute/root.hpp"])
    assert set(kept) == set(files) - {"cute/in_comment.hpp", "cute/unreached.hpp"}
    assert kept["cute/root.hpp"].decode() == files["cute/root.hpp"]


def test_missing_header_of_the_sources_is_an_error_that_names_its_includer(headers, index):
    with pytest.raises(RuntimeError, match=r"cute/root\.hpp includes <cutlass/gone\.h>"):
        headers.closure(index({"cute/root.hpp": "#include <cutlass/gone.h>\n"}), ["cute/root.hpp"])
    with pytest.raises(RuntimeError, match=r"list of roots includes <cute/gone\.hpp>"):
        headers.closure(index({}), ["cute/gone.hpp"])


def test_wheel_with_another_hash_is_refused(headers, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for source in headers.SOURCES:
        with zipfile.ZipFile(wheels / f"{source.wheel}1-py3-none-any.whl", "w") as wheel:
            wheel.writestr(source.licence, "licence")
    destination = tmp_path / "third_party"
    with pytest.raises(RuntimeError, match=r"nvidia_cutlass-1.*sha256 is [0-9a-f]{64}"):
        headers.fetch(destination, wheels)
    assert [path.name for path in tmp_path.iterdir()] == ["wheels"]  # nothing half-made stays


def test_missing_wheel_is_named(headers, tmp_path):
    with pytest.raises(RuntimeError, match=r"found \[\], expected one nvidia_cutlass-"):
        headers.fetch(tmp_path / "third_party", tmp_path)


def test_tree_is_current_and_is_left_alone_until_the_pins_change(headers, tmp_path):
    assert headers.is_current(THIRD_PARTY)
    copy = tmp_path / "third_party"
    shutil.copytree(THIRD_PARTY, copy)
    assert headers.fetch(copy, wheels=tmp_path) is False
    (copy / "PINS").write_text("other pins\n")
    with pytest.raises(RuntimeError, match="expected one nvidia_cutlass-"):  # it wants to rebuild, from a folder without wheels
        headers.fetch(copy, wheels=tmp_path)
    assert (copy / "cutlass" / "LICENSE").exists()  # and the old tree outlives the failure


def test_tree_has_both_licences_and_no_runtime_headers():
    assert "Redistribution and use in source and binary forms" in (THIRD_PARTY / "cutlass" / "LICENSE").read_text()
    cccl = (THIRD_PARTY / "cccl" / "LICENSE").read_text()
    assert "Apache License" in cccl and "LLVM Exceptions" in cccl
    files = [path.relative_to(THIRD_PARTY) for path in THIRD_PARTY.rglob("*") if path.is_file()]
    folders = {("cutlass", "cute"), ("cutlass", "cutlass"), ("cccl", "cuda"), ("cccl", "nv")}
    assert {path.parts[:2] for path in files} == {("PINS",), ("cutlass", "LICENSE"), ("cccl", "LICENSE"), *folders}
    licence = {"cutlass": b"BSD-3-Clause", "cccl": b"Apache-2.0 WITH LLVM-exception"}
    for path in files:
        text = (THIRD_PARTY / path).read_bytes()
        assert b"NOTICE TO LICENSEE" not in text, path  # how NVIDIA's own licence begins in the runtime headers
        if path.name not in ("PINS", "LICENSE") and "generated" not in path.parts:  # CCCL's generated parts carry no line of their own
            assert b"SPDX-License-Identifier: " + licence[path.parts[0]] in text, path


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_root_compiles_from_the_closure_alone(headers, arch, tmp_path, monkeypatch):
    lines = [f"#include <{root}>" for root in headers.ROOTS]
    lines += ["#include <cccl/cuda/std/array>", "#include <deep_gemm/kernels/echo_params.cuh>"]
    (tmp_path / "all_roots.cuh").write_text("\n".join(lines) + "\n")
    tools = jit.compiler.toolchain()
    cuda = next(root for root in tools.roots if (root / "cuda_bf16.h").is_file())
    assert not (cuda / "cutlass").exists()
    roots = (tmp_path, REPOSITORY / "deep_gemm" / "include", THIRD_PARTY / "cutlass", THIRD_PARTY, THIRD_PARTY / "cccl", cuda)
    monkeypatch.setattr(jit.compiler, "toolchain", lambda: dataclasses.replace(tools, roots=roots))
    assert jit.compiler.compile_spec(echo_spec(header="all_roots.cuh", arch=arch)).cubin[:4] == b"\x7fELF"
