"""The JIT without a GPU. Properties: a spec's text is exact and typed; cubins are made for each architecture; the key holds everything
that decides the code and nothing else; one process of many compiles; no death, no damage and no read-only folder gives a wrong or missing
kernel; what is missing, and what is wrong in a kernel, is named."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from jit_helpers import REPOSITORY, echo_spec, run, start

from deep_gemm import jit
from deep_gemm.errors import BackendUnavailable, CompileError
from deep_gemm.jit import CppType, KernelSpec, cache, compiler, driver, headers, loader


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "counters", cache.Counter())
    cache.warn_once.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def include_root(tmp_path, monkeypatch):
    """An extra include root for headers that a test writes."""
    root = tmp_path / "include"
    root.mkdir()
    tools = compiler.toolchain()
    monkeypatch.setattr(compiler, "toolchain", lambda: dataclasses.replace(tools, roots=(root, *tools.roots)))
    yield root
    headers.clear_memo()


def header_spec(include_root: Path, body: str) -> KernelSpec:
    text = f"#pragma once\ntemplate <class Config>\n__device__ void entry(const int& params) {{\n{body}\n}}\n"
    (include_root / "written_by_test.cuh").write_text(text)
    return KernelSpec("written_by_test", "written_by_test.cuh", "entry", "int", {}, 32, "sm_90a")


# --- the spec


def test_config_values_become_typed_members():
    spec = echo_spec(config={"kCount": 3, "kWide": 2**40, "kOn": True, "kScale": 0.1, "Element": CppType("__nv_bfloat16")})
    lines = [line.strip() for line in spec.source.splitlines()]
    assert "static constexpr int kCount = 3;" in lines
    assert f"static constexpr long long kWide = {2**40}LL;" in lines
    assert "static constexpr bool kOn = true;" in lines
    assert "using Element = __nv_bfloat16;" in lines
    (scale,) = [line for line in lines if "kScale" in line]
    assert float.fromhex(scale.split("= ")[1].rstrip("f;")) == pytest.approx(0.1, rel=1e-7)


def test_specs_are_equal_when_the_source_is():
    assert echo_spec() == echo_spec() and hash(echo_spec()) == hash(echo_spec())
    first, second = echo_spec(config={"kMark": 1, "kB": 2}), echo_spec(config={"kB": 2, "kMark": 1})
    assert first == second, "the order of config does not matter"
    assert echo_spec(config={"kMark": 1}) != echo_spec(config={"kMark": True}), "1 and True are different C++ types"
    assert echo_spec(arch="sm_90a") != echo_spec(arch="sm_100a")
    assert pickle.loads(pickle.dumps(first)) == first


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"name": "a b"}, "KernelSpec.name = 'a b'"),
        ({"header": "/abs/x.cuh"}, "KernelSpec.header"),
        ({"arch": "compute_90"}, "KernelSpec.arch"),
        ({"threads": 2048}, "threads = 2048"),
        ({"config": {"kX": 2**63}}, "kX"),
        ({"config": {"kX": float("nan")}}, "kX"),
        ({"config": {"kX": 1e39}}, "kX"),
    ],
)
def test_bad_spec_is_named(overrides, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        echo_spec(**overrides)


def test_config_of_unknown_type_is_refused():
    with pytest.raises(TypeError, match="kX"):
        echo_spec(config={"kX": "text"})


# --- compilation


@pytest.mark.parametrize(("arch", "number"), [("sm_90a", 90), ("sm_100a", 100)])
def test_compiles_to_a_cubin_of_the_architecture(arch, number):
    entry = jit.build(echo_spec(arch=arch))
    assert entry.cubin[:4] == b"\x7fELF"
    flags = int.from_bytes(entry.cubin[48:52], "little")
    assert number in (flags & 0xFF, flags >> 8 & 0xFF), "e_flags of the ELF header hold the SM number"
    assert b".version" not in entry.cubin and b".nv_fatbin" not in entry.cubin, "no PTX inside"
    assert "registers" in entry.path.with_suffix(".log").read_text()


def test_second_build_comes_from_disk(private_cache):
    first, second = jit.build(echo_spec()), jit.build(echo_spec())
    assert (first.origin, second.origin) == ("compiled", "disk") and first.cubin == second.cubin
    assert jit.status()["misses"] == 1 and jit.status()["hits_disk"] == 1 and jit.status()["compile_seconds"] > 0
    assert jit.status()["cache_dir"] == str(private_cache)
    jit.clear()
    assert jit.build(echo_spec()).origin == "compiled"


def test_compile_error_shows_the_source_line(include_root):
    spec = header_spec(include_root, "  int before = 1;\n  int x = no_such_name;\n  int after = 2;")
    with pytest.raises(CompileError) as caught:
        jit.build(spec)
    text = str(caught.value)
    assert re.search(r"^> +5 \|   int x = no_such_name;$", text, re.MULTILINE)
    assert re.search(r"^ +4 \|   int before = 1;$", text, re.MULTILINE)
    assert "kernel written_by_test() for sm_90a" in text and "-arch=sm_90a" in text and 'identifier "no_such_name" is undefined' in text


def test_error_in_the_generated_source_shows_it():
    with pytest.raises(CompileError, match=r">\s+\d+ \|   no_such_entry<Config>\(params\);"):
        jit.build(echo_spec(entry="no_such_entry"))


def test_digest_covers_every_header_that_the_compiler_opens(tmp_path, monkeypatch):
    """Compiles a CUTLASS kernel from the covered files alone: a header that the digest missed would not be found."""
    spec = next(spec for spec in jit.shipped_specs("sm_90a") if spec.header == "deep_gemm/kernels/sm90_bf16_gemm.cuh")
    tools = compiler.toolchain()
    for relative, path in headers.Closure(spec.header, tools.roots).files.items():
        target = tmp_path / "only" / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    monkeypatch.setattr(compiler, "toolchain", lambda: dataclasses.replace(tools, roots=(tmp_path / "only",)))
    assert compiler.compile_spec(spec).cubin[:4] == b"\x7fELF"


# --- the key


def test_key_is_the_same_in_a_moved_checkout(tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(REPOSITORY / "deep_gemm", copy / "deep_gemm", ignore=shutil.ignore_patterns("third_party", "*.so", "__pycache__"))
    third_party = headers.PACKAGE / "include" / "third_party"
    (copy / "deep_gemm" / "include" / "third_party").symlink_to(third_party)
    script = (
        "from jit_helpers import echo_spec; from deep_gemm.jit import compiler, headers; print(headers.PACKAGE);"
        "print(compiler.key(echo_spec())); print(compiler.key(echo_spec(header='deep_gemm/kernels/sm90_bf16_gemm.cuh')))"
    )
    here, there = run(script, tmp_path).splitlines(), run(script, tmp_path, copy).splitlines()
    assert there[0] == str(copy / "deep_gemm")
    assert here[1:] == there[1:] and here[1] != here[2]


def test_header_edit_changes_the_key(include_root):
    (include_root / "inner.cuh").write_text("// one\n")
    spec = header_spec(include_root, '#include "inner.cuh"\n')
    keys = [compiler.key(spec)]
    for text in ("// two\n", "// one\n"):
        (include_root / "inner.cuh").write_text(text)
        headers.clear_memo()
        keys.append(compiler.key(spec))
    assert keys[0] != keys[1] and keys[0] == keys[2]


def test_key_depends_on_config_architecture_flags_and_compiler(monkeypatch):
    keys = {compiler.key(echo_spec()), compiler.key(echo_spec(mark=8)), compiler.key(echo_spec(arch="sm_100a"))}
    tools = compiler.toolchain()
    monkeypatch.setattr(compiler, "toolchain", lambda: dataclasses.replace(tools, version=(13, 99)))
    keys.add(compiler.key(echo_spec()))
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, "-lineinfo"))
    keys.add(compiler.key(echo_spec()))
    assert len(keys) == 5


# --- the disk cache


def test_four_processes_at_once_compile_once(private_cache):
    script = (
        "import time; from jit_helpers import echo_spec; from deep_gemm.jit import build, cache, compiler; real = compiler.compile_spec\n"
        "compiler.compile_spec = lambda spec: (time.sleep(1.0), real(spec))[1]\n"
        "print(build(echo_spec()).origin)"
    )
    processes = [start(script, private_cache) for _ in range(4)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert sorted(out.strip() for out, _ in outputs) == ["compiled", "disk", "disk", "disk"], outputs


@pytest.mark.parametrize("moment", ["compiling", "writing"])
def test_killed_process_leaves_nothing_in_the_way(private_cache, moment):
    script = (
        "import os, signal, time; from jit_helpers import echo_spec; from deep_gemm.jit import build, cache, compiler\n"
        "die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        + ("compiler.compile_spec = die\n" if moment == "compiling" else "os.fsync = die\n")
        + "build(echo_spec())"
    )
    process = start(script, private_cache)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert not list(private_cache.glob("*.cubin"))
    assert len(list(private_cache.glob(".*.tmp"))) == (moment == "writing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jit.build(echo_spec()).origin == "compiled"
    assert not list(private_cache.glob(".*.tmp"))
    assert jit.build(echo_spec()).origin == "disk"


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_corrupted_cubin_is_compiled_again(damage):
    entry = jit.build(echo_spec())
    data = bytearray(entry.path.read_bytes())
    data[len(data) // 2] ^= 1
    entry.path.write_bytes({"flip": bytes(data), "cut": bytes(data[:-7]), "empty": b""}[damage])
    again = jit.build(echo_spec())
    assert (again.origin, again.cubin) == ("compiled", entry.cubin)
    assert cache.counters["corrupted"] >= 1
    assert jit.build(echo_spec()).origin == "disk"


@pytest.fixture
def open_folder():
    """A folder that any user can reach: those above `tmp_path` are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_read_only_folder_is_used_and_warned_about_once(open_folder, monkeypatch):
    folder = open_folder / "cache"
    monkeypatch.setenv("DG_CACHE_DIR", str(folder))
    present = jit.build(echo_spec(mark=1))
    assert present.path.parent == folder
    script = f"""
import os, warnings
from jit_helpers import echo_spec
from deep_gemm.jit import build, cache, compiler, warmup
specs = [echo_spec(mark=mark) for mark in (1, 2, 3)]
for spec in specs: compiler.key(spec)
os.chmod({str(folder)!r}, 0o555)
if os.geteuid() == 0:  # root may write anywhere: the cache is used as nobody, who may not even read the checkout
    real = compiler.compile_spec
    compiler.compile_spec = lambda spec: (os.seteuid(0), real(spec), os.seteuid(65534))[1]
    os.seteuid(65534)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    entries = [build(spec) for spec in specs]
assert [entry.origin for entry in entries] == ["disk", "compiled", "compiled"], entries
assert entries[1].path is None
print(len(seen), seen[0].message, cache.writable())
"""
    count, text, writable = re.fullmatch(r"(\d+) (.*) (\w+)", run(script, folder)).groups()
    assert count == "1" and "cannot write compiled kernels" in text and "DG_CACHE_DIR" in text and writable == "False"
    assert not list(folder.glob(".*.tmp"))


def test_file_system_without_locks_still_compiles(monkeypatch):
    def no_locks(*_):
        raise OSError(cache.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(cache.fcntl, "lockf", no_locks)
    with pytest.warns(RuntimeWarning, match="without locks"):
        assert jit.build(echo_spec()).origin == "compiled"
    assert jit.build(echo_spec()).origin == "disk"


def test_stopped_owner_of_the_lock_is_not_waited_for_without_end(private_cache, monkeypatch):
    key = compiler.key(echo_spec())
    script = (
        "import time; from pathlib import Path; from deep_gemm.jit import cache\n"
        f"with cache._lock(Path({str(private_cache)!r}), {key!r}):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    owner = start(script, private_cache)
    assert owner.stdout.readline() == "held\n"
    monkeypatch.setattr(cache, "LOCK_WAIT_SECONDS", 0.2)
    with pytest.warns(RuntimeWarning, match="waited"):
        assert jit.build(echo_spec()).origin == "compiled"
    owner.kill()
    owner.communicate()


# --- warm-up and the list of kernels


def test_warmup_compiles_in_processes_and_reports(private_cache, capsys):
    good, bad = [echo_spec(mark=mark) for mark in range(3)], echo_spec(entry="no_such_entry")
    report = jit.warmup([*good, good[0], bad], max_workers=2)
    assert len(report.compiled) == 3 and not report.cached and report.workers == 2
    assert list(report.failures) == [bad] and "no_such_entry" in report.failures[bad]
    with pytest.raises(CompileError, match="no_such_entry"):
        report.raise_failures()
    again = jit.warmup(good)
    assert (len(again.cached), again.compiled, again.workers) == (3, [], 0)
    assert capsys.readouterr().err == ""
    assert all(jit.build(spec).origin == "disk" for spec in good)
    jit.warmup(good, progress=True)
    assert "3/3" in capsys.readouterr().err


def test_warmup_survives_the_death_of_a_worker(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'deep_gemm.jit.worker' in sys.orig_argv:\n"
        "    import deep_gemm.jit.loader as l; l.build = lambda spec: os._exit(9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = jit.warmup([echo_spec(mark=1), echo_spec(mark=2)], max_workers=1)
    assert len(report.failures) == 2 and all("status 9" in text for text in report.failures.values())


def test_every_provider_of_the_library_answers():
    specs = jit.shipped_specs()
    assert specs and len(set(specs)) == len(specs) and all(isinstance(spec, KernelSpec) for spec in specs)
    names = {spec.name for spec in specs}
    assert any("gemm" in name for name in names) and any("mega_moe" in name for name in names)


def test_shipped_specs_come_from_providers(monkeypatch):
    monkeypatch.setitem(sys.modules, "some_provider", SimpleNamespace(specs=lambda: [echo_spec(), echo_spec(), echo_spec(arch="sm_100a")]))
    monkeypatch.setattr(jit.shipped, "PROVIDERS", [])
    jit.register_shipped("some_provider:specs")
    assert jit.shipped_specs() == [echo_spec(), echo_spec(arch="sm_100a")]
    assert jit.shipped_specs("sm_100a") == [echo_spec(arch="sm_100a")]
    with pytest.raises(ValueError, match="module:function"):
        jit.register_shipped("no_function")


# --- what is missing is named


def test_missing_parts_are_named(monkeypatch, tmp_path):
    compiler.toolchain.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cuda.bindings", None)
            with pytest.raises(BackendUnavailable, match="pip install 'cuda-bindings"):
                compiler.toolchain()
        with monkeypatch.context() as patch:
            from cuda.bindings import nvrtc

            def absent():
                raise RuntimeError("Failed to dlopen libnvrtc.so.13")

            patch.setattr(nvrtc, "nvrtcVersion", absent)
            with pytest.raises(BackendUnavailable, match="pip install 'nvidia-cuda-nvrtc"):
                compiler.toolchain()
        with monkeypatch.context() as patch:
            patch.setattr(compiler, "_cuda_version", lambda directory: 12)
            with pytest.raises(BackendUnavailable, match=r"no CUDA 13 headers.*\(CUDA 12\).*pip install 'nvidia-cuda-runtime==13"):
                compiler.toolchain()
    finally:
        compiler.toolchain.cache_clear()
    roots = (headers.PACKAGE / "include" / "deep_gemm" / "..",)
    with pytest.raises(BackendUnavailable, match=r"cutlass.*fetch_headers"):
        headers.Closure("deep_gemm/kernels/sm90_bf16_gemm.cuh", roots).check_complete(roots)


def test_import_needs_neither_cuda_bindings_nor_extension_nor_torch(tmp_path):
    script = (
        "import sys; sys.modules.update({'cuda': None, 'cuda.bindings': None, 'deep_gemm._C': None, 'torch': None})\n"
        "from jit_helpers import echo_spec; from deep_gemm import errors, jit\n"
        "for call in (lambda: jit.build(echo_spec()), lambda: jit.load(echo_spec(), 0), lambda: print(jit.status()['nvrtc_missing'])):\n"
        "    try: call()\n    except errors.BackendUnavailable as error: print(error)"
    )
    lines = run(script, tmp_path).splitlines()
    assert len(lines) == 3 and all("cuda-bindings is not installed" in line for line in lines)


def test_driver_older_than_the_compiler_is_refused(monkeypatch):
    monkeypatch.setattr(driver, "get", lambda: SimpleNamespace(version=(12, 8)))
    with pytest.raises(BackendUnavailable, match=r"driver supports CUDA 12\.8, the compiler is NVRTC 13\.\d+"):
        loader._check_driver()


def test_kernel_for_another_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(driver, "get", lambda: SimpleNamespace(version=(99, 0)))
    monkeypatch.setattr(driver, "device_arch", lambda index: "sm_80a")
    with pytest.raises(BackendUnavailable, match="for sm_90a, but device 0 is sm_80"):
        loader._check_device(echo_spec(), 0)
