"""The wheel index: its pages, that it only grows, what it refuses, and that pip and uv install from it over HTTP with hashes."""

from __future__ import annotations

import fcntl
import hashlib
import html
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from index_helpers import build_index, installer_environment, locked, make_wheel, run, serve

NAME = "dg_index_hello"  # not a project of PyPI
PROJECT = "dg-index-hello"


class Anchors(HTMLParser):
    """links: text -> attributes; outside: what the page loads or links from elsewhere."""

    def __init__(self, page: Path):
        super().__init__()
        self.links: dict[str, dict[str, str]] = {}
        self.metas: list[dict[str, str]] = []
        self.addresses: list[str] = []
        self._open: dict[str, str] | None = None
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.addresses += [value for name, value in attributes.items() if name in ("href", "src", "action")]
        if tag == "meta":
            self.metas.append(attributes)
        self._open = attributes if tag == "a" else self._open

    def handle_data(self, data):
        if self._open is not None:
            self.links[data], self._open = self._open, None


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def add(site: Path, *sources: Path, url: str = "https://kernels.example") -> int:
    return build_index().main([str(site), *map(str, sources), "--url", url])


def snapshot(site: Path) -> dict[str, bytes]:
    return {path.relative_to(site).as_posix(): path.read_bytes() for path in site.rglob("*") if path.is_file()}


def make_sdist(folder: Path, name: str = NAME, version: str = "1.0") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}.tar.gz"
    content = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.10\n".encode()
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(f"{name}-{version}/PKG-INFO")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def site(tmp_path) -> Path:
    return tmp_path / "site"


def test_project_page_links_file_hash_python_and_metadata(site, tmp_path):
    wheel, sdist = make_wheel(tmp_path / "dist", NAME, "1.0"), make_sdist(tmp_path / "dist")
    (tmp_path / "dist" / "SHA256SUMS").write_text("not a distribution")
    assert add(site, tmp_path / "dist") == 0
    page = site / "simple" / PROJECT / "index.html"
    assert 'data-requires-python="&gt;=3.10,&lt;4"' in page.read_text(), "escaped, as PEP 503 asks"
    parsed = Anchors(page)
    assert {"name": "pypi:repository-version", "content": "1.0"} in parsed.metas
    link = parsed.links[wheel.name]
    address, _, digest = link["href"].partition("#sha256=")
    assert (page.parent / address).resolve() == site / "pool" / wheel.name and digest == sha256(wheel)
    metadata = site / "pool" / f"{wheel.name}.metadata"
    assert link["data-core-metadata"] == link["data-dist-info-metadata"] == f"sha256={sha256(metadata)}"
    assert metadata.read_text().startswith("Metadata-Version") and link["data-requires-python"] == ">=3.10,<4"
    assert parsed.links[sdist.name].keys() == {"href", "data-requires-python"}
    assert Anchors(site / "simple" / "index.html").links == {PROJECT: {"href": f"{PROJECT}/"}}


def test_new_release_keeps_old_versions_and_their_addresses(site, tmp_path):
    add(site, make_wheel(tmp_path / "one", NAME, "9.0"))
    before = snapshot(site / "pool")
    add(site, make_wheel(tmp_path / "two", NAME, "10.0"), make_wheel(tmp_path / "two", "other_project", "1.0"))
    assert before.items() <= snapshot(site / "pool").items()
    names = list(Anchors(site / "simple" / PROJECT / "index.html").links)
    assert [name.split("-")[1] for name in names] == ["9.0", "10.0"], "in the order of versions"
    assert list(Anchors(site / "simple" / "index.html").links) == [PROJECT, "other-project"]


def test_same_files_give_the_same_bytes(site, tmp_path):
    one, two = make_wheel(tmp_path / "dist", NAME, "1.0"), make_wheel(tmp_path / "dist", NAME, "2.0")
    add(site, one, two)
    first, written = snapshot(site), (site / "index.html").stat().st_mtime_ns
    assert add(site, two) == 0
    assert snapshot(site) == first and (site / "index.html").stat().st_mtime_ns == written
    other = tmp_path / "other"
    add(other, two)
    add(other, one)
    assert snapshot(other) == first, "whatever the order in which they came"


def test_second_content_of_a_name_is_refused_and_nothing_is_written(site, tmp_path, capsys):
    add(site, make_wheel(tmp_path / "one", NAME, "1.0"))
    before = snapshot(site)
    changed, fresh = make_wheel(tmp_path / "two", NAME, "1.0", text="changed"), make_wheel(tmp_path / "two", NAME, "0.9")
    assert add(site, fresh, changed) == 1
    assert f"{changed} (sha256 {sha256(changed)}) differs from {site / 'pool' / changed.name}" in capsys.readouterr().err
    assert snapshot(site) == before
    assert add(tmp_path / "empty", tmp_path / "one", tmp_path / "two") == 1, "two inputs of one name"
    assert snapshot(tmp_path / "empty") == {}


def test_input_that_cannot_be_served_is_named(site, tmp_path, capsys):
    wheel = make_wheel(tmp_path / "dist", NAME, "1.0")
    wrong = wheel.rename(wheel.with_name(f"{NAME}-2.0-py3-none-any.whl"))
    cut, unnamed, empty = tmp_path / f"{NAME}-1.0-py3-none-any.whl", tmp_path / "hello.whl", tmp_path / "nothing"
    cut.write_bytes(wrong.read_bytes()[:100])
    unnamed.write_bytes(wrong.read_bytes())
    empty.mkdir()
    expected = {
        wrong: f"its name says {PROJECT} 2.0, its metadata {PROJECT} 1.0",
        cut: "not a wheel or sdist that can be served",
        unnamed: "not a wheel or sdist that can be served",
        empty: "no wheel (.whl) and no sdist",
        tmp_path / "absent": "no such file or folder",
    }
    for source, text in expected.items():
        assert add(site, source) == 1
        message = capsys.readouterr().err
        assert str(source) in message and text in message
    assert snapshot(site) == {}


def test_killed_run_is_completed_by_the_next(site, tmp_path, monkeypatch):
    add(site, make_wheel(tmp_path / "one", NAME, "1.0"))
    before, module = snapshot(site), build_index()
    real = module.os.replace

    def replace(source, target):
        if str(target).endswith("index.html"):
            raise KeyboardInterrupt
        real(source, target)

    two = make_wheel(tmp_path / "two", NAME, "2.0")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.os, "replace", replace)
        add(site, two)
    after = snapshot(site)
    assert {name: after[name] for name in before} == before, "readers still see the old index"
    assert after.keys() - before.keys() == {f"pool/{two.name}", f"pool/{two.name}.metadata"}
    (site / "pool" / ".new.leftover").touch()
    add(site, tmp_path / "one")
    assert two.name in Anchors(site / "simple" / PROJECT / "index.html").links and not list(site.rglob(".new.*"))


def test_two_runs_at_once_take_turns(site, tmp_path):
    site.mkdir()
    wheels = [make_wheel(tmp_path / str(number), NAME, f"{number}.0") for number in range(3)]
    descriptor = os.open(site, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    command = [sys.executable, str(Path(build_index().__file__)), str(site)]
    runs = [subprocess.Popen([*command, str(wheel)], stdout=subprocess.DEVNULL) for wheel in wheels]
    time.sleep(0.5)
    assert snapshot(site) == {}, "they wait for the lock"
    os.close(descriptor)
    assert [process.wait(60) for process in runs] == [0, 0, 0]
    assert len(Anchors(site / "simple" / PROJECT / "index.html").links) == 3


def test_landing_page_tells_people_how_and_loads_nothing_from_elsewhere(site, tmp_path):
    depends = ("torch>=2.9", "cuda-bindings<14,>=12.9", 'pytest; extra == "test"')
    old, new = (make_wheel(tmp_path / "dist", NAME, version, requires=depends) for version in ("1.0", "2.0"))
    make_wheel(tmp_path / "dist", NAME, "3.0rc1")
    add(site, tmp_path / "dist", url="https://kernels.example/")
    text = html.unescape((site / "index.html").read_text())
    assert f"pip install --no-deps --index-url https://kernels.example/simple/ {PROJECT}==2.0" in text
    assert "pip install 'torch>=2.9' 'cuda-bindings<14,>=12.9'\n" in text
    assert f"{PROJECT} @ https://kernels.example/pool/{new.name}#sha256={sha256(new)}" in text
    assert "explicit = true" in text and f'{PROJECT} = {{ index = "kernels" }}' in text
    parsed = Anchors(site / "index.html")
    assert not [address for address in parsed.addresses if re.match(r"[a-z]+:(?!,)|//", address)]
    assert "<script" not in text and "@import" not in text
    for file in (old, new):
        address, _, digest = parsed.links[file.name]["href"].partition("#sha256=")
        assert sha256(site / unquote(address)) == digest == sha256(file) and f"sha256:{digest}" in text


def test_addresses_of_wheels_for_two_architectures_can_be_copied_together(site, tmp_path):
    platforms = ("manylinux2014_aarch64.manylinux_2_17_aarch64", "manylinux_2_28_x86_64")
    wheels = [make_wheel(tmp_path / "dist", NAME, "1.0", platform=platform) for platform in platforms]
    add(site, tmp_path / "dist", url="https://k.example")
    addresses = [f"{PROJECT} @ https://k.example/pool/{wheel.name}#sha256={sha256(wheel)}" for wheel in wheels]
    both = f"{addresses[0]} ; platform_machine == 'aarch64'\n{addresses[1]} ; platform_machine == 'x86_64'"
    assert both in html.unescape((site / "index.html").read_text())
    with serve(site) as (url, asked):
        (tmp_path / "requirements.txt").write_text(both.replace("https://k.example", url))
        pip("install", "--dry-run", "--quiet", "-r", "requirements.txt", cwd=tmp_path)
    assert {path.partition("-py3")[2].partition(".metadata")[0] for path in asked} == {
        f"-none-{platforms[os.uname().machine == 'x86_64']}.whl"
    }


def test_plus_of_a_local_version_is_quoted_in_addresses(site, tmp_path):
    wheel = make_wheel(tmp_path / "dist", NAME, "1.0+cu130")
    add(site, wheel)
    assert Anchors(site / "simple" / PROJECT / "index.html").links[wheel.name]["href"].startswith(f"../../pool/{NAME}-1.0%2Bcu130-")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(URL, log of requests, the wheels by version)"""
    folder = tmp_path_factory.mktemp("served")
    wheels = {version: make_wheel(folder / "dist", NAME, version, text=version) for version in ("1.0", "2.0+cu130")}
    add(folder / "site", folder / "dist")
    with serve(folder / "site") as (url, asked):
        yield url, asked, wheels


def pip(*arguments: object, cwd: Path) -> str:
    return run(sys.executable, "-m", "pip", *arguments, cwd=cwd, env=installer_environment(cwd))


def test_pip_installs_over_http_and_reads_the_metadata_first(served, tmp_path):
    url, asked, wheels = served
    asked.clear()
    pip("install", "--index-url", f"{url}/simple/", "--target", tmp_path / "target", f"{PROJECT}==1.0", cwd=tmp_path)
    assert (tmp_path / "target" / f"{NAME}.py").read_text() == "text = '1.0'\n"
    name = wheels["1.0"].name
    assert asked == [f"/simple/{PROJECT}/", f"/pool/{name}.metadata", f"/pool/{name}"]


def test_pip_report_states_the_hash_of_the_newest_version(served, tmp_path):
    url, asked, wheels = served
    asked.clear()
    options = ("--dry-run", "--ignore-installed", "--quiet", "--report", "report.json")
    pip("install", "--index-url", f"{url}/simple/", *options, PROJECT, cwd=tmp_path)
    (item,) = json.loads((tmp_path / "report.json").read_text())["install"]
    wheel = wheels["2.0+cu130"]
    assert item["metadata"]["version"] == "2.0+cu130"
    assert item["download_info"]["archive_info"]["hashes"] == {"sha256": sha256(wheel)}
    # Some releases of pip go on to fetch the wheel.
    assert asked[:2] == [f"/simple/{PROJECT}/", f"/pool/{wheel.name.replace('+', '%2B')}.metadata"]


def test_pip_downloads_by_direct_address_and_refuses_a_wrong_hash(served, tmp_path):
    url, _, wheels = served
    address = f"{url}/pool/{wheels['1.0'].name}"
    pip("download", "--dest", "got", f"{PROJECT} @ {address}#sha256={sha256(wheels['1.0'])}", cwd=tmp_path)
    assert sha256(tmp_path / "got" / wheels["1.0"].name) == sha256(wheels["1.0"])
    command = [sys.executable, "-m", "pip", "download", "--dest", "no", f"{PROJECT} @ {address}#sha256={'0' * 64}"]
    refused = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, env=installer_environment(tmp_path))
    assert refused.returncode != 0 and "DO NOT MATCH" in refused.stderr


def test_uv_locks_address_and_hash_from_an_explicit_index(served, tmp_path):
    url, asked, wheels = served
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nname = "user"\nversion = "0"\nrequires-python = ">=3.10"\ndependencies = ["{PROJECT}==1.0"]\n'
        f'[[tool.uv.index]]\nname = "kernels"\nurl = "{url}/simple/"\nexplicit = true\n[tool.uv.sources]\n{PROJECT} = {{ index = "kernels" }}\n'
    )
    asked.clear()
    run(sys.executable, "-m", "uv", "lock", "--python", sys.executable, cwd=tmp_path, env=installer_environment(tmp_path))
    assert locked(tmp_path / "uv.lock", PROJECT) == (f"{url}/simple/", {f"{url}/pool/{wheels['1.0'].name}": sha256(wheels["1.0"])})
    assert f"/pool/{wheels['1.0'].name}.metadata" in asked and f"/pool/{wheels['1.0'].name}" not in asked
