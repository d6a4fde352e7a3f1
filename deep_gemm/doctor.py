"""`deep-gemm doctor`: can this machine run the kernels, and if not, what to do. One line a part.

FAIL: something that this machine needs is missing or broken. WARN: it works, slower or in part; so is everything that only a GPU needs on a
machine without one, where the reference backend runs. machine.py gathers, this file judges."""

from __future__ import annotations

import dataclasses
import importlib.util
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import distributions, jit
from ._version import __version__
from .jit import cache, headers
from .machine import Machine, inspect

TORCH_NEEDED = (2, 9)
CAPABILITIES = {(9, 0)}  # Hopper; the kernels are compiled for sm_90a
THIRD_PARTY = {"cutlass": "CUTLASS", "cccl": "CCCL"}


@dataclass(frozen=True)
class Line:
    """state: OK, WARN or FAIL; found: what is there; remedy: what to do about it, empty when OK."""

    name: str
    state: str
    found: str
    remedy: str = ""


def check_gpus(machine: Machine) -> list[Line]:
    if not machine.gpus:
        why = "the driver sees none (CUDA_VISIBLE_DEVICES?)" if machine.driver_cuda else "no driver"
        return [Line("GPU", "WARN", f"none: {why}", "only the reference backend runs here, on the CPU; kernels need an NVIDIA Hopper GPU")]
    lines = []
    usable = any(gpu.capability in CAPABILITIES for gpu in machine.gpus)
    for gpu in machine.gpus:
        found = f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}, {gpu.gigabytes:.0f} GiB"
        if gpu.capability in CAPABILITIES:
            lines.append(Line(f"GPU {gpu.index}", "OK", found))
        else:
            remedy = "there are kernels for compute capability 9.0 (H100, H200, GH200) only: use another GPU, or backend='reference'"
            lines.append(Line(f"GPU {gpu.index}", "WARN" if usable else "FAIL", found, remedy))
    return lines


def _remedy_of(error: str, otherwise: str = "") -> tuple[str, str]:
    """The library's own errors end with `: what to do`."""
    found, _, remedy = error.rpartition(": ")
    return (found, remedy) if "install" in remedy or "run `" in remedy else (error, otherwise)


def check_driver(machine: Machine) -> Line:
    if machine.driver_error:
        if "CUDA_ERROR_NO_DEVICE" in machine.driver_error:
            return Line(
                "driver", "WARN", "it is installed and sees no GPU", "CUDA_VISIBLE_DEVICES hides them, or this container was given none"
            )
        installed = machine.driver_version or machine.driver_cuda  # the kernel module is loaded, yet the library does not work
        found, remedy = _remedy_of(
            machine.driver_error, "install the NVIDIA driver (>= 580 for CUDA 13), or pass the GPU and its driver into this container"
        )
        return Line("driver", "FAIL" if installed else "WARN", found, remedy)
    found = f"{machine.driver_version or 'version unknown'}, for CUDA {machine.driver_cuda[0]}.{machine.driver_cuda[1]}"
    if machine.tools and machine.driver_cuda[0] < machine.tools.version[0]:
        compiler = f"{machine.tools.version[0]}.{machine.tools.version[1]}"
        return Line(
            "driver",
            "FAIL",
            f"{found}, but NVRTC is {compiler}",
            f"it loads no kernels of CUDA {machine.tools.version[0]}: update it to 580 or later, or install a torch for its CUDA version",
        )
    return Line("driver", "OK", found)


def check_torch(machine: Machine) -> Line:
    if machine.torch is None:
        return Line("torch", "FAIL", machine.torch_error, "pip install 'torch>=2.9'")
    version, cuda = machine.torch.__version__, machine.torch.version.cuda
    found = f"{version}, {f'CUDA {cuda}' if cuda else 'built without CUDA'}"
    if tuple(int(part) for part in version.split(".")[:2]) < TORCH_NEEDED:
        return Line("torch", "FAIL", found, "pip install 'torch>=2.9'")
    if machine.gpus and not cuda:
        return Line("torch", "FAIL", found, "install a CUDA build of torch: this one does not see the GPU")
    if machine.gpus and not machine.torch.cuda.is_available():
        return Line(
            "torch",
            "FAIL",
            f"{found}; it does not see the GPU",
            "python -c 'import torch; torch.cuda.init()' says why (a driver too old for its CUDA?)",
        )
    return Line("torch", "OK", found)


def check_nvrtc(machine: Machine) -> list[Line]:
    """NVRTC and the CUDA headers: found together or not at all."""
    if machine.tools:
        version = f"{machine.tools.version[0]}.{machine.tools.version[1]}"
        return [Line("NVRTC", "OK", version), Line("CUDA headers", "OK", str(machine.tools.cuda_include))]
    if jit.status()["pack"]["usable"]:  # its kernels load all the same
        state, found = "WARN", f"only the kernels of the pack can run: {machine.tools_error}"
    else:
        state, found = "FAIL" if machine.gpus else "WARN", machine.tools_error
    return [Line("NVRTC, headers", state, *_remedy_of(found))]


def check_headers(_: Machine) -> Line:
    """What the wheel carries and a source checkout fetches."""
    base = headers.PACKAGE / "include"
    absent = [label for folder, label in THIRD_PARTY.items() if not (base / "third_party" / folder).is_dir()]
    if not (base / "deep_gemm").is_dir():
        absent.append("deep_gemm")
    if absent:
        return Line(
            "our headers",
            "FAIL",
            f"no {', '.join(absent)} in {base}",
            "python scripts/fetch_headers.py in a checkout, or install the wheel again",
        )
    return Line("our headers", "OK", f"{base}, with {' and '.join(THIRD_PARTY.values())}")


def check_extension(machine: Machine) -> Line:
    if machine.extension_error:
        return Line("extension", "FAIL", *_remedy_of(machine.extension_error))
    return Line("extension", "OK", "deep_gemm._C")


def check_symmetric_memory(machine: Machine) -> Line:
    name = "symmetric memory"
    if not machine.gpus:
        return Line(name, "WARN", "no GPU", "ranks on the CPU exchange through torch.distributed instead")
    deaf = [str(gpu.index) for gpu in machine.gpus if not gpu.exports_memory]
    if deaf:
        remedy = "expert parallelism needs it (cuMemExportToShareableHandle); a virtual GPU or WSL may not have it"
        return Line(name, "WARN", f"GPU {', '.join(deaf)} cannot share memory between processes", remedy)
    if machine.torch is None:
        return Line(name, "WARN", "no torch", "see the line of torch")
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return Line(name, "FAIL", "not in this torch", "pip install 'torch>=2.9'")
    return Line(name, "OK", "in torch; every GPU can share its memory between processes")


def check_links(machine: Machine) -> Line:
    name, count = "GPU to GPU", len(machine.gpus)
    if count < 2:
        return Line(name, "OK", "nothing to connect")
    apart = [f"{link.source}-{link.target}" for link in machine.links if not link.access]
    slow = [f"{link.source}-{link.target}" for link in machine.links if link.access and not link.atomics]
    if apart:
        shown = ", ".join(apart[:4]) + (", ..." if len(apart) > 4 else "")
        return Line(
            name,
            "WARN",
            f"no peer access: {shown}",
            "ranks of one group need GPUs that reach each other: choose them with CUDA_VISIBLE_DEVICES, see `nvidia-smi topo -p2p r`",
        )
    if slow:
        return Line(
            name,
            "WARN",
            f"peer access without NVLink for {len(slow)} of {len(machine.links)} pairs",
            "it works at the speed of PCIe; `nvidia-smi topo -m` shows what is connected how",
        )
    return Line(name, "OK", f"peer access with native atomics (NVLink) between all {count}")


def check_cache(_: Machine) -> Line:
    status, folder = jit.status(), cache.directory()
    kept = list(folder.glob("*.cubin")) if folder else []
    found = f"{folder}: {len(kept)} kernels, {sum(path.stat().st_size for path in kept) / 2**20:.1f} MiB" if folder else "no home directory"
    if status["cache_writable"]:
        return Line("JIT cache", "OK", found)
    remedy = "every process compiles again what is not in it: set DG_CACHE_DIR to a folder that can be written"
    return Line("JIT cache", "WARN", found if folder is None else f"{found}, not writable", remedy)


def check_pack(_: Machine) -> Line:
    pack = jit.status()["pack"]
    if pack["usable"]:
        return Line("kernel pack", "OK", f"{pack['entries']} kernels in {pack['dir']}")
    if not Path(pack["dir"]).is_dir():
        return Line("kernel pack", "OK", f"none: {pack['reason']}; kernels are compiled at first use")
    return Line(
        "kernel pack",
        "WARN",
        f"not used: {pack['reason']}",
        "kernels are compiled at first use instead; an untouched wheel has its pack in order",
    )


def check_distributions(_: Machine) -> Line:
    name, ours = "installed as", ("deep-gemm", __version__)
    found = distributions.owners_on_path(sys.path)
    foreign = [owner for owner in found if (owner.name, owner.version) != ours]
    if foreign or len(found) > 1:
        shown = ", ".join(f"{owner} in {owner.folder}" for owner in found)
        return Line(name, "FAIL", f"{headers.PACKAGE} is version {__version__}, but installed: {shown}", distributions.remedy(found))
    return Line(name, "OK", f"{found[0]} in {found[0].folder}" if found else f"not installed: source tree {headers.PACKAGE.parent}")


CHECKS: tuple[Callable[[Machine], Line | list[Line]], ...] = (
    check_gpus,
    check_driver,
    check_torch,
    check_nvrtc,
    check_headers,
    check_extension,
    check_symmetric_memory,
    check_links,
    check_cache,
    check_pack,
    check_distributions,
)


def _judge(check: Callable[[Machine], Line | list[Line]], machine: Machine) -> list[Line]:
    try:
        lines = check(machine)
    except Exception as error:  # noqa: BLE001 - a doctor that dies of what it finds helps nobody: say it and go on
        name = check.__name__.removeprefix("check_").replace("_", " ")
        lines = Line(name, "FAIL", f"{type(error).__name__}: {error}", "not foreseen: please report it with this text")
    return lines if isinstance(lines, list) else [lines]


def examine(machine: Machine) -> list[Line]:
    """All lines, in the order in which they are printed."""
    return [line for check in CHECKS for line in _judge(check, machine)]


def as_json(lines: list[Line]) -> dict[str, Any]:
    """{"version", "python", "platform", "ok", "lines": [{"name", "state", "found", "remedy"}]}"""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "ok": all(line.state != "FAIL" for line in lines),
        "lines": [dataclasses.asdict(line) for line in lines],
    }


def as_text(lines: list[Line]) -> str:
    """The screen: state, part, what was found; below it what to do."""
    width = max(len(line.name) for line in lines)
    rows = [f"deep_gemm {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    for line in lines:
        rows.append(f"{line.state:<4}  {line.name:<{width}}  {line.found}")
        if line.remedy:
            rows.append(f"{'':<{width + 8}}-> {line.remedy}")
    states = [line.state for line in lines]
    rows.append(f"{states.count('FAIL')} FAIL, {states.count('WARN')} WARN, {states.count('OK')} OK")
    return "\n".join(rows)


def diagnose() -> list[Line]:
    """All lines for this machine."""
    return examine(inspect())
