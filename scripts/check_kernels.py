"""Compiles every shipped kernel for sm_90a on the CPU and inspects the machine code: no spills, tensor cores in use, no advice ignored.

    python scripts/check_kernels.py [--match TEXT] [--arch sm_90a] [--json FILE]

Prints a row per kernel (registers per thread, static shared memory and stack in bytes, HGMMA count, cubin bytes) and exits with 1 when
a kernel keeps locals in memory (stack frame, local memory, LDL/STL), a GEMM has no HGMMA, or ptxas reports a performance loss (an ignored
setmaxnreg, serialised WGMMAs). Needs NVRTC, cuobjdump and nvdisasm (`pip install 'deep_gemm[compiler]'`), and no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deep_gemm import jit

KEPT = Path(__file__).resolve().parents[1] / "build" / "inspections"

_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
# SASS line: /*0040*/   @P0 HGMMA.64x256x16.F32.BF16 ... ;
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
_LOSS = re.compile(r"^.*(?:Potential Performance Loss|setmaxnreg.*ignored).*$", re.MULTILINE | re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What the machine code of one kernel shows. registers: per thread; shared, stack, local, num_bytes: bytes; losses: lines of ptxas."""

    name: str
    config: str
    registers: int
    shared: int
    stack: int
    local: int
    num_hgmma: int
    num_local_accesses: int
    num_bytes: int
    losses: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        """Why this kernel may not ship; empty when it may."""
        found = []
        if self.stack or self.local:
            found.append(f"{self.stack} bytes of stack and {self.local} bytes of local memory per thread, expected 0")
        if self.num_local_accesses:
            found.append(f"{self.num_local_accesses} LDL/STL instructions (register spills or indexed locals), expected 0")
        if ("gemm" in self.name or "mega_moe_forward" in self.name) and self.num_hgmma == 0:
            found.append("no HGMMA instruction, expected WGMMA in a GEMM")
        return found + list(self.losses)


def tool(name: str) -> str:
    """Path of a CUDA binary utility: from its wheel, else from PATH."""
    package = importlib.util.find_spec("nvidia")
    roots = package.submodule_search_locations if package else ()
    folders = [str(path) for root in roots for path in sorted(Path(root).glob("*/bin"), reverse=True)]
    found = shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))
    if found is None:
        raise FileNotFoundError(f"{name} is neither in nvidia/*/bin of this Python nor on PATH: pip install nvidia-cuda-{name}")
    return found


def cuobjdump(option: str, cubin: Path) -> str:
    # cuobjdump calls nvdisasm by name.
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(tool("nvdisasm")).parent), os.environ.get("PATH", "")])}
    result = subprocess.run([tool("cuobjdump"), option, str(cubin)], check=False, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise RuntimeError(f"cuobjdump {option} {cubin} (exit {result.returncode}): {result.stderr.strip()}")
    return result.stdout


def compiler_log(spec: jit.KernelSpec, path: Path | None) -> str:
    """What ptxas said when the kernel was compiled: kept beside the cubin; from a new compilation where it is not."""
    try:
        return path.with_suffix(".log").read_text()
    except (AttributeError, FileNotFoundError):
        return jit.compiler.compile_spec(spec).log


def inspect(spec: jit.KernelSpec) -> Inspection:
    """What the cubin of `spec` shows, compiling it if the cache has none. Half a second of disassembly a kernel, so it is kept under build/."""
    entry = jit.build(spec)
    log = compiler_log(spec, entry.path)
    # All that an inspection depends on.
    parts = (entry.cubin, log.encode(), str(spec).encode(), Path(__file__).read_bytes())
    kept = KEPT / f"{hashlib.sha256(b''.join(hashlib.sha256(part).digest() for part in parts)).hexdigest()}.json"
    try:
        values = json.loads(kept.read_text())
        return Inspection(**{**values, "losses": tuple(values["losses"])})
    except (FileNotFoundError, ValueError):
        inspection = disassemble(spec, entry, log)
    kept.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: runs may overlap.
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as file:
        json.dump(dataclasses.asdict(inspection), file)
    os.replace(file.name, kept)
    return inspection


def disassemble(spec: jit.KernelSpec, entry, log: str) -> Inspection:
    """`inspect` from the cubin of `entry` and what ptxas said of it."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(entry.cubin)
        usage = {name: tuple(map(int, numbers)) for name, *numbers in _USAGE.findall(cuobjdump("-res-usage", cubin))}
        opcodes = Counter(_INSTRUCTION.findall(cuobjdump("-sass", cubin)))
    if list(usage) != [spec.name] or not opcodes["EXIT"]:
        raise RuntimeError(f"{spec}: cuobjdump shows functions {list(usage)} with {opcodes.total()} instructions, expected {spec.name}")
    registers, stack, shared, local = usage[spec.name]
    losses = tuple(line.strip() for line in _LOSS.findall(log))
    local_accesses = opcodes["LDL"] + opcodes["STL"]
    return Inspection(
        spec.name, str(spec), registers, shared, stack, local, opcodes["HGMMA"], local_accesses, len(entry.cubin), losses
    )  # fmt: skip


def inspect_all(specs: list[jit.KernelSpec]) -> list[Inspection]:
    """Compiles what the cache lacks, in parallel processes, and inspects every kernel; in the order of `specs`."""
    jit.warmup(specs).raise_failures()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(inspect, specs))


def table(inspections: list[Inspection]) -> str:
    width = max(len(item.name) for item in inspections)
    lines = [f"{'kernel':{width}}  registers  shared  stack  HGMMA   bytes"]
    lines += [
        f"{item.name:{width}}  {item.registers:9}  {item.shared:6}  {item.stack:5}  {item.num_hgmma:5}  {item.num_bytes:6}"
        for item in inspections
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--match", default="", help="only kernels whose name contains this text")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    specs = [spec for spec in jit.shipped_specs(options.arch) if options.match in spec.name]
    if not specs:
        print(f"no shipped kernel for {options.arch} has {options.match!r} in its name", file=sys.stderr)
        return 1
    inspections = inspect_all(specs)
    print(table(inspections))
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(item) for item in inspections], indent=1) + "\n")
    faulty = [item for item in inspections if item.faults]
    for item in faulty:
        print(f"\n{item.config}:\n  " + "\n  ".join(item.faults), file=sys.stderr)
    print(f"{len(inspections)} kernels for {options.arch}, {len(faulty)} with faults")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
