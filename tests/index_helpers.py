"""A wheel index on loopback, and installers that see it and PyPI alone."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

from jit_helpers import REPOSITORY


@functools.cache
def build_index() -> ModuleType:
    """scripts/build_index as a module: it has no suffix."""
    loader = importlib.machinery.SourceFileLoader("build_index", str(REPOSITORY / "scripts" / "build_index"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


@contextmanager
def serve(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """(URL, paths asked for, in order, as requests come in) of a plain static host on loopback."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, code="-", size="-"):
            asked.append(self.path)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()


def installer_environment(home: Path, **more: str) -> dict[str, str]:
    """Without the machine's own indexes and caches for pip and uv (a cached answer would ask the index for nothing)."""
    dropped = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("UV_")}
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_CACHE_DIR": str(home / "uv-cache")}
    return {**kept, **own, "UV_PYTHON_DOWNLOADS": "never", **more}


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Standard output; the test fails with all output when the command does."""
    result = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, cwd=cwd, env=env)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def locked_from(lock: Path) -> dict[str, str]:
    """Index of each project in a uv.lock."""
    return dict(re.findall(r'^name = "([^"]+)"\nversion = .*\nsource = \{ registry = "([^"]+)"', lock.read_text(), re.MULTILINE))


def locked(lock: Path, project: str) -> tuple[str, dict[str, str]]:
    """(index, SHA-256 by address of the files) of a project in a uv.lock."""
    (entry,) = [part for part in lock.read_text().split("[[package]]") if part.startswith(f'\nname = "{project}"\n')]
    return locked_from(lock)[project], dict(re.findall(r'url = "([^"]+)", hash = "sha256:(\w+)"', entry))


def make_wheel(folder: Path, name: str, version: str, text: str = "", requires: tuple[str, ...] = (), platform: str = "any") -> Path:
    """A small wheel with one module."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-{platform}.whl", f"{name}-{version}.dist-info"
    depends = "".join(f"Requires-Dist: {line}\n" for line in requires)
    files = {
        f"{name}.py": f"text = {text!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.10,<4\n{depends}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-{platform}\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in {**files, f"{info}/RECORD": "".join(f"{member},,\n" for member in [*files, f"{info}/RECORD"])}.items():
            archive.writestr(zipfile.ZipInfo(member), content)  # ZipInfo: a fixed date, so equal content makes equal bytes
    return path
