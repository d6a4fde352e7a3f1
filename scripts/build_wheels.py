"""Makes the release files of one commit; run by scripts/build_wheels, in an environment of scripts/build-requirements.txt.

commit -> clean copy -> kernel pack -> source distribution -> a wheel per CPU architecture, built from that source distribution -> audits.
Every time stamp is the commit's, every mode 644 or 755, every build starts from an empty folder: the same commit, Python and gcc give the same
bytes. A file is moved to the output folder only when all audits have passed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import audit_wheel
import fetch_headers

PROJECT = Path(__file__).resolve().parent.parent
HEADER_WHEELS = PROJECT / "build" / "header-wheels"
ARCHITECTURES = ("x86_64", "aarch64")
ENTRY = Path(sys.executable).parent  # of the tools' commands; not resolved: python is a link out of the environment


def run(*command: object, cwd: Path = PROJECT, capture: bool = False, **environment: str) -> str:
    """Runs a command, with the variables added to those of this process; its words are shown only when it fails."""
    text = [str(part) for part in command]
    result = subprocess.run(
        text, check=False, cwd=cwd, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True,
        stderr=None if capture else subprocess.STDOUT,
    )  # fmt: skip
    if result.returncode:
        tail = "\n".join(result.stdout.splitlines()[-40:])  # a build lists every file before it says what is wrong
        sys.exit(f"{' '.join(text)} (exit {result.returncode}, in {cwd}):\n{tail}")
    return result.stdout


def export(allow_dirty: bool, tree: Path) -> str:
    """Copies the project's files, as git lists them, to `tree`, with modes and times that do not depend on this checkout. Returns the epoch."""
    changed = run("git", "status", "--porcelain", capture=True).splitlines()
    if changed and not allow_dirty:
        sys.exit("the checkout differs from its commit (--allow-dirty builds it all the same):\n" + "\n".join(changed[:20]))
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", capture=True).split("\0")
    epoch = run("git", "log", "-1", "--format=%ct", capture=True).strip()
    for name in sorted(set(filter(None, names))):
        source, target = PROJECT / name, tree / name
        if source.is_file():  # a file that was removed and not committed is still listed
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
            target.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)
            os.utime(target, (int(epoch), int(epoch)))
    return epoch


def header_wheels() -> Path:
    """The folder with the pinned wheels of headers, fetched once for each state of the pins; their hashes are checked at every use."""
    pins = HEADER_WHEELS / fetch_headers.REQUIREMENTS.name
    if not pins.is_file() or pins.read_bytes() != fetch_headers.REQUIREMENTS.read_bytes():
        shutil.rmtree(HEADER_WHEELS, ignore_errors=True)
        fetch_headers.download(HEADER_WHEELS)
        shutil.copyfile(fetch_headers.REQUIREMENTS, pins)
    return HEADER_WHEELS


def add_pack(tree: Path, python: str) -> None:
    """Puts the kernel pack into the copy; its headers decide the keys, so they are fetched there first."""
    run(python, "setup.py", "--quiet", "build_ext", "--inplace", cwd=tree)  # the list of kernels is read through the extension
    environment = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    print(run(python, "scripts/build_pack.py", "--out", "deep_gemm/kernel_pack", cwd=tree, **environment), end="")


def make_sdist(tree: Path, epoch: int, work: Path) -> Path:
    """The source distribution, written anew so that its bytes depend on names and contents alone."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", work / "raw", cwd=tree)
    (raw,) = (work / "raw").glob("*.tar.gz")
    path = work / raw.name
    with (
        tarfile.open(raw) as source,
        open(path, "wb") as file,
        gzip.GzipFile("", "wb", 9, file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & stat.S_IXUSR else 0o644
            member.pax_headers = {}
            target.addfile(member, source.extractfile(member) if member.isfile() else None)
    return path


def compiler_environment(architecture: str, folder: Path) -> dict[str, str]:
    """Variables that make setuptools compile for `architecture`: nothing for this machine's own, else zig against glibc 2.17.

    Python.h is this machine's: the limited API is the same text everywhere, and pyconfig.h differs in nothing that the extension uses, which
    audit_wheel.check_headers asks the compiler."""
    if architecture == platform.machine():
        return {}
    wrapper = folder / "zig-cc"
    include = f'-I"{debian_pyconfig(architecture, folder)}"'
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang cc -target {architecture}-linux-gnu.2.17 {include} "$@"\n')
    wrapper.chmod(0o755)
    audit_wheel.check_headers(wrapper, folder)
    command = shlex.quote(str(wrapper))
    return {"CC": command, "LDSHARED": f"{command} -shared", "_PYTHON_HOST_PLATFORM": f"linux-{architecture}"}


def debian_pyconfig(architecture: str, folder: Path) -> Path:
    """Folder of headers for the cross compiler. Debian's pyconfig.h only includes <its architecture's triplet>/pythonX.Y/pyconfig.h: there the target's is
    this machine's, under the target's name. Empty for any other Python."""
    shim, version = folder / "pyconfig", f"python{sys.version_info.major}.{sys.version_info.minor}"
    shim.mkdir()
    own = Path("/usr/include") / (sysconfig.get_config_var("MULTIARCH") or "none") / version / "pyconfig.h"
    if own.is_file() and Path(sysconfig.get_path("include")).is_relative_to("/usr/include"):
        target = shim / f"{architecture}-linux-gnu" / version
        target.mkdir(parents=True)
        shutil.copy(own, target)
    return shim


def make_wheel(sdist: Path, architecture: str, work: Path) -> Path:
    """A manylinux wheel of the source distribution."""
    folder = work / architecture
    folder.mkdir()
    shutil.unpack_archive(sdist, folder)
    (tree,) = (path for path in folder.iterdir() if path.is_dir())
    variables = compiler_environment(architecture, folder)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "raw", cwd=tree, **variables)
    (raw,) = (folder / "raw").glob("*.whl")
    repair = (ENTRY / "auditwheel", "repair", "--plat", "auto", "--wheel-dir", folder / "repaired", raw)
    run(*repair, PATH=os.pathsep.join([str(ENTRY), os.environ["PATH"]]))  # it calls patchelf by name
    (wheel,) = (folder / "repaired").glob("*.whl")
    return wheel


def check_pack(wheel: Path, python: str, work: Path) -> str:
    """Every shipped kernel comes from the pack of the unpacked wheel, where nothing can compile."""
    site = work / "site"
    zipfile.ZipFile(wheel).extractall(site)
    script = (
        "from deep_gemm import jit\nfrom deep_gemm.errors import BackendUnavailable\n"
        "def absent(): raise BackendUnavailable('no compiler in this check')\n"
        "jit.compiler.toolchain = absent\nspecs = jit.shipped_specs()\n"
        "assert all(jit.build(spec).origin == 'pack' for spec in specs), jit.status()\n"
        "print(len(specs), 'kernels come from the pack')"
    )
    return run(python, "-c", script, cwd=site, PYTHONPATH=str(site)).strip()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="build_wheels", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PROJECT / "dist")
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--work", type=Path, default=PROJECT / "build" / "release", help="folder for everything in between; emptied first")
    parser.add_argument("--allow-dirty", action="store_true", help="build the checkout as it is, not only a commit")
    parser.add_argument("--kernel-python", required=True, help="interpreter of the environment that compiles kernels")
    return parser.parse_args()


def main() -> None:
    options = parse()
    os.umask(0o022)
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    tree = work / "source"
    tree.mkdir(parents=True)
    os.environ["SOURCE_DATE_EPOCH"] = epoch = export(options.allow_dirty, tree)
    os.environ["DEEP_GEMM_HEADER_WHEELS"] = str(header_wheels())
    add_pack(tree, options.kernel_python)
    sdist = make_sdist(tree, int(epoch), work)
    wheels = [make_wheel(sdist, architecture, work) for architecture in options.arch]
    for wheel in wheels:
        audit_wheel.audit(wheel)
        if platform.machine() in wheel.name:
            print(check_pack(wheel, options.kernel_python, work))
    run(ENTRY / "twine", "check", "--strict", sdist, *wheels)
    options.out.mkdir(parents=True, exist_ok=True)
    for path in (sdist, *wheels):
        target = options.out / path.name
        shutil.copyfile(path, target)
        print(f"{hashlib.sha256(target.read_bytes()).hexdigest()}  {target.stat().st_size:>9,} bytes  {target}")


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"build_wheels: {error}")
