"""Time from torch's import to the first result of mega_moe_fwd, in fresh processes with an empty kernel cache.

    python scripts/bench/first_call.py [--shape qwen3-30b] [--tokens 64] [--repeat 5] [--device cuda] [--json results/first-call.json]

Run it against an installed wheel (or PYTHONPATH=<its unpacked folder>) for the time with the kernel pack, against a checkout for the time with
compilations. The inputs are made in between and do not count: they are the caller's. Prints the median of each phase: `context` is CUDA's own
start, `import`, `buffer` and `fwd` are the library's, `second` is a later call. Exits with 1 when --limit-ms is given and their sum with `context`
exceeds it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

LIBRARY = ("import", "buffer", "fwd")


def child(options: argparse.Namespace) -> dict[str, object]:
    """Milliseconds of each phase in this process."""
    import torch

    begin, phases = time.perf_counter(), {}
    device = torch.device(options.device)

    def lap(name: str | None) -> None:
        nonlocal begin
        if device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if name:
            phases[name] = 1e3 * (now - begin)
        begin = time.perf_counter()

    torch.zeros(1, device=device)
    lap("context")
    import deep_gemm
    from deep_gemm.testing import MODEL_SHAPES, generators  # counted too: it loads modules that the call would load

    get_buffer, forward = deep_gemm.get_symm_buffer_for_mega_moe, deep_gemm.mega_moe_fwd
    lap("import")
    shape = MODEL_SHAPES[options.shape]
    x = generators.rows(options.tokens, shape.hidden, seed=0, device=device)
    topk = generators.routing("uniform", options.tokens, shape.num_experts, shape.num_topk, device=device)
    weights = generators.expert_weights(range(shape.num_experts), shape.hidden, shape.intermediate_hidden, device=device)
    lap(None)
    buffer = get_buffer(None, shape.num_experts, options.tokens, shape.num_topk, shape.hidden, shape.intermediate_hidden, device=device)
    lap("buffer")
    for name in ("fwd", "second"):
        y, _ = forward(x, *topk, *weights, buffer)
        lap(name)
    if not y.isfinite().all():
        raise RuntimeError("y has values that are not finite")
    status = deep_gemm.jit.status()
    return {**phases, "hits_pack": status["hits_pack"], "misses": status["misses"], "package": deep_gemm.__file__}


def in_new_process() -> dict[str, object]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "DG_CACHE_DIR": cache}
        output = subprocess.run(
            [sys.executable, *sys.argv, "--child"], check=True, stdout=subprocess.PIPE, text=True, env=environment
        ).stdout
    return json.loads(output.splitlines()[-1])


def record(options: argparse.Namespace, runs: list[dict[str, object]]) -> None:
    from deep_gemm.testing import results

    totals = sorted(sum(run[phase] for phase in ("context", *LIBRARY)) for run in runs)
    phases = ", ".join(f"{phase} {median(run[phase] for run in runs):.0f}" for phase in ("context", *LIBRARY, "second"))
    row = {
        "case": f"{options.shape}/T{options.tokens}/EP1/bf16/uniform",
        "system": f"first call, {'compiled' if runs[0]['misses'] else 'packed' if runs[0]['hits_pack'] else 'no'} kernels",
        "direction": "fwd",
        "median_ms": median(totals),
        "p10_ms": totals[0],
        "p90_ms": totals[-1],
        "sustained_ms": None,
        "tflops": None,
        "notes": f"{len(runs)} fresh processes (p10, p90: fastest, slowest); ms: {phases}",
    }
    results.merge(options.json, [row], key=("case", "system", "direction"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit-ms", type=float)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return 0
    runs = [in_new_process() for _ in range(options.repeat)]
    print(f"{runs[0]['package']}: {runs[0]['hits_pack']} kernels from the pack, {runs[0]['misses']} compiled")
    for phase in ("context", *LIBRARY, "second"):
        print(f"{phase:8} {median(run[phase] for run in runs):8.1f} ms")
    total = median(sum(run[phase] for phase in ("context", *LIBRARY)) for run in runs)
    print(f"{'total':8} {total:8.1f} ms: torch's import to the first result, without the inputs")
    if options.json:
        record(options, runs)
    return int(options.limit_ms is not None and total > options.limit_ms)


if __name__ == "__main__":
    sys.exit(main())
