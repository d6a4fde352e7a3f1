"""Compiles every shipped kernel and writes the kernel pack that goes into the wheel: docs/releasing.md.

    python scripts/build_pack.py --out deep_gemm/kernel_pack

Architectures are those of the shipped kernels. Needs NVRTC and CUDA headers (`pip install 'deep_gemm[compiler]'`), and no GPU. The disk cache is
used: kernels that the tests compiled are not compiled again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deep_gemm import jit
from deep_gemm.jit import pack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to make: empty or missing")
    options = parser.parse_args()
    if pack.state().pack is not None:
        parser.error(f"{pack.FOLDER} is a pack already: a pack is made from what the compiler gives, never from another")
    specs = jit.shipped_specs()
    jit.warmup(specs).raise_failures()
    pack.write(options.out, {spec: jit.build(spec).cubin for spec in specs})
    size = sum(path.stat().st_size for path in options.out.iterdir())
    print(f"{options.out}: {len(specs)} kernels for {', '.join(sorted({spec.arch for spec in specs}))}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
