"""The kernel pack (jit/pack.py). Properties: a packed kernel needs neither NVRTC nor CUDA headers, whatever compiler is installed; a pack of other
headers, another release, a newer CUDA than the driver's, or with damaged files is never loaded, and status() says why; same inputs, same pack."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from jit_helpers import REPOSITORY, echo_spec, run

from deep_gemm import jit
from deep_gemm._version import __version__
from deep_gemm.errors import BackendUnavailable
from deep_gemm.jit import cache, compiler, driver, headers, loader, pack


def forget() -> None:
    pack.clear_memo()
    headers.clear_memo()
    cache.warn_once.cache_clear()


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "counters", cache.Counter())
    monkeypatch.setattr(pack, "FOLDER", tmp_path / "kernel_pack")
    monkeypatch.setattr(driver, "cuda_version", lambda: None)
    forget()
    yield
    forget()


@pytest.fixture
def packed(private_cache) -> Path:
    """The folder of a pack with one kernel, as installed."""
    pack.write(pack.FOLDER, {echo_spec(): compiler.compile_spec(echo_spec()).cubin})
    return pack.FOLDER


@pytest.fixture
def no_compiler(monkeypatch):
    def absent():
        raise BackendUnavailable("NVRTC, the CUDA run-time compiler, is not installed")

    monkeypatch.setattr(compiler, "toolchain", absent)


def edit(folder: Path, **changes: object) -> None:
    path = folder / pack.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    forget()


def refused_because(text: str) -> bool:
    """The pack is not used, compiles instead, and says so."""
    status = jit.status()["pack"]
    return jit.build(echo_spec()).origin == "compiled" and not status["usable"] and status["hits"] == 0 and text in status["reason"]


# --- hits


def test_packed_kernel_needs_no_compiler(packed, no_compiler):
    entry = jit.build(echo_spec())
    assert entry.origin == "pack" and entry.path.parent == packed and entry.cubin[:4] == b"\x7fELF"
    with pytest.raises(BackendUnavailable, match="NVRTC"):
        jit.build(echo_spec(mark=8))
    status = jit.status()
    assert status["nvrtc"] is None and "NVRTC" in status["nvrtc_missing"]
    assert status["pack"].items() >= {"entries": 1, "usable": True, "reason": None, "hits": 1, "dir": str(packed)}.items()
    assert status["pack"]["toolchain"].startswith("nvrtc ") and (status["hits_pack"], status["misses"]) == (1, 0)


def test_packed_kernel_is_found_with_another_compiler_installed(packed, monkeypatch):
    other = SimpleNamespace(version=(12, 9), build=1, identity="nvrtc 12.9 1", roots=())
    monkeypatch.setattr(compiler, "toolchain", lambda: other)
    assert jit.build(echo_spec()).origin == "pack"


def test_packed_kernel_is_loaded_without_compiler(packed, no_compiler, monkeypatch):
    monkeypatch.setattr(driver, "device_arch", lambda index: "sm_90a")
    monkeypatch.setattr(driver, "get", lambda: SimpleNamespace(version=(13, 0)))
    monkeypatch.setattr(loader, "LoadedKernel", lambda spec, index, cubin: SimpleNamespace(registers=1, spill_bytes=0, cubin=cubin))
    monkeypatch.setattr(loader, "_loaded", {})
    assert jit.load(echo_spec(), 0).cubin == jit.build(echo_spec()).cubin
    with pytest.raises(BackendUnavailable, match="NVRTC"):
        jit.load(echo_spec(mark=8), 0)


def test_warmup_takes_packed_kernels_without_compiler(packed, no_compiler):
    report = jit.warmup([echo_spec()])
    assert (report.cached, report.compiled, report.workers) == ([str(echo_spec())], [], 0)


def test_pack_is_found_beside_the_package_wherever_that_is(packed, tmp_path):
    """In a process that has neither cuda-bindings nor torch."""
    site = tmp_path / "site"
    skip = shutil.ignore_patterns("*.so", "__pycache__", "kernel_pack")
    shutil.copytree(REPOSITORY / "deep_gemm", site / "deep_gemm", ignore=skip)
    shutil.copytree(packed, site / "deep_gemm" / "kernel_pack")
    script = (
        "import sys; sys.modules.update({'cuda': None, 'cuda.bindings': None, 'torch': None})\n"
        "from jit_helpers import echo_spec; from deep_gemm import jit; print(jit.build(echo_spec()).origin, jit.status()['pack']['dir'])"
    )
    assert run(script, tmp_path / "cache", site).split() == ["pack", str(site / "deep_gemm" / "kernel_pack")]


def test_keys_of_all_shipped_kernels_take_under_50_ms(packed, no_compiler):
    specs = jit.shipped_specs()
    seconds = []
    for _ in range(5):  # the best of five: other tests share the cores
        forget()
        begin = time.perf_counter()
        assert len([spec for spec in specs if pack.find(spec)]) == 0
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.05, seconds


# --- misses


def test_without_a_pack_everything_is_as_before():
    assert [jit.build(echo_spec()).origin for _ in range(2)] == ["compiled", "disk"]
    assert jit.status()["pack"].items() >= {"entries": 0, "usable": False, "hits": 0}.items()
    assert "source checkout" in jit.status()["pack"]["reason"]


def test_other_architecture_or_source_is_not_in_the_pack(packed):
    for spec in (echo_spec(arch="sm_100a"), echo_spec(mark=8), echo_spec(threads=64)):
        assert jit.build(spec).origin == "compiled", spec
    assert jit.build(echo_spec()).origin == "pack"


def test_other_flags_are_not_in_the_pack(packed, monkeypatch):
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-lineinfo"))
    assert jit.build(echo_spec()).origin == "compiled"


@pytest.mark.parametrize("header", ["deep_gemm/kernels/echo_params.cuh", "third_party/cutlass/LICENSE", "added.cuh"])
def test_edited_or_added_header_makes_the_pack_stale(packed, tmp_path, monkeypatch, header):
    """Any file of the package's headers: what a kernel reaches through CUDA's headers is not known without these."""
    shutil.copytree(headers.PACKAGE / "include", tmp_path / "package" / "include")
    changed = tmp_path / "package" / "include" / header
    changed.write_text((changed.read_text() if changed.exists() else "") + "\n")
    monkeypatch.setattr(headers, "PACKAGE", tmp_path / "package")
    forget()
    assert refused_because("headers")
    changed.write_text(changed.read_text()[:-1])
    if header == "added.cuh":
        changed.unlink()
    forget()
    assert jit.build(echo_spec()).origin == "pack"


def test_edited_shim_makes_the_pack_stale(packed, monkeypatch):
    monkeypatch.setitem(headers.SHIMS, "stdint.h", headers.SHIMS["stdint.h"] + "\n")
    forget()
    assert refused_because("headers")


@pytest.mark.parametrize(("version", "used"), [((12, 8), False), ((13, 0), True), ((14, 1), True), (None, True)])
def test_pack_of_a_newer_cuda_than_the_driver_is_not_used(packed, monkeypatch, version, used):
    edit(packed, cuda_major=13)
    monkeypatch.setattr(driver, "cuda_version", lambda: version)
    if used:
        assert jit.build(echo_spec()).origin == "pack"
    else:
        assert refused_because("made for CUDA 13, the driver supports CUDA 12.8")


@pytest.mark.parametrize(
    ("changes", "reason"), [({"package": "2.9.9"}, "made for deep_gemm 2.9.9"), ({"format": 99}, "has format 99, expected 1")]
)
def test_pack_of_another_release_is_not_used(packed, changes, reason):
    edit(packed, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert refused_because(reason)


def test_pack_that_claims_another_compiler_has_no_matching_key(packed):
    edit(packed, toolchain="nvrtc 12.9 1")
    assert jit.build(echo_spec()).origin == "compiled"


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_cubins_are_compiled_instead_with_one_warning(private_cache, damage):
    specs = [echo_spec(mark=mark) for mark in (1, 2)]
    pack.write(pack.FOLDER, {spec: compiler.compile_spec(spec).cubin for spec in specs})
    for path in pack.FOLDER.glob("*.cubin"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data if damage == "flip" else data[:-1])
        if damage == "gone":
            path.unlink()
    with pytest.warns(RuntimeWarning, match="kernel_pack") as seen:
        assert [jit.build(spec).origin for spec in specs] == ["compiled", "compiled"]
    assert len(seen) == 1 and cache.counters["corrupted"] == 2
    assert [jit.build(spec).origin for spec in specs] == ["disk", "disk"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"format": pack.FORMAT, "package": __version__, "kernels": []})])
def test_damaged_manifest_is_ignored_with_one_warning(packed, text):
    (packed / pack.MANIFEST).write_text(text)
    forget()
    with pytest.warns(RuntimeWarning, match="manifest.json is damaged.*reinstall") as seen:
        assert refused_because("is damaged")
    assert len(seen) == 1


# --- making one


def test_same_kernels_make_the_same_pack(packed, tmp_path):
    pack.write(tmp_path / "again", {echo_spec(): compiler.compile_spec(echo_spec()).cubin})
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (packed, tmp_path / "again"))
    assert first == second and len(first) == 2


def test_pack_is_not_written_over_another(packed):
    with pytest.raises(FileExistsError, match="expected an empty or missing folder"):
        pack.write(packed, {})
