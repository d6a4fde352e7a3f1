"""Accuracy of each precision's emulation on the CPU, against FP64: results/reference-cpu.json.

    python scripts/reference_numbers.py [--json results/reference-cpu.json] [--tokens 256]

The three model shapes with H and I divided by 4 and 16 experts, so that an expert has as many rows as with the whole E at 2048 to 4096 tokens and
the run takes well under a minute on 2 cores; the case names the sizes used. Inputs are BF16 values (x, dy normal, weights with deviation
1 / sqrt(fan-in), uniform routing). `rel_frobenius`, `diff`, `max_row_rel` are those of the emulation with FP32 arithmetic; `bf16` quantises
nothing, so it shows the error of the FP32 oracle itself. `torch_rel_frobenius` is the trainer-style BF16 path (torch._grouped_mm and autograd).
"""

from __future__ import annotations

import argparse

import torch

from deep_gemm import reference
from deep_gemm.testing import generators, results
from deep_gemm.testing.numeric import measure_errors
from deep_gemm.testing.torch_path import torch_moe

NUM_EXPERTS = 16
SCALE_DOWN = 4


def torch_path(dy: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    x, topk_idx, topk_weights, w13, w2 = inputs
    leaves = {
        name: tensor.clone().requires_grad_() for name, tensor in (("x", x), ("topk_weights", topk_weights), ("w13", w13), ("w2", w2))
    }
    y = torch_moe(leaves["x"], topk_idx, leaves["topk_weights"], leaves["w13"], leaves["w2"])
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy)))}


def oracle(dy: torch.Tensor, inputs: tuple[torch.Tensor, ...], **options) -> dict[str, torch.Tensor]:
    return {"y": reference.forward(*inputs, **options), **reference.backward(dy, *inputs, **options)}


def rows_of_shape(name: str, num_tokens: int) -> list[dict]:
    shape = generators.MODEL_SHAPES[name]
    hidden, intermediate = shape.hidden // SCALE_DOWN, shape.intermediate_hidden // SCALE_DOWN
    topk_idx, topk_weights = generators.routing("uniform", num_tokens, NUM_EXPERTS, shape.num_topk)
    w13, w2 = generators.expert_weights(range(NUM_EXPERTS), hidden, intermediate)
    inputs = (generators.rows(num_tokens, hidden, seed=1), topk_idx, topk_weights, w13, w2)
    dy = generators.rows(num_tokens, hidden, seed=2)
    truth = oracle(dy, inputs, dtype=torch.float64)
    torch_errors = {tensor: measure_errors(value, truth[tensor]).rel_frobenius for tensor, value in torch_path(dy, inputs).items()}
    rows = []
    for precision in reference.PRECISIONS:
        case = f"{name}:H{hidden}:I{intermediate}:E{NUM_EXPERTS}:K{shape.num_topk}/T{num_tokens}/EP1/{precision}/uniform"
        for tensor, value in oracle(dy, inputs, precision=precision).items():
            # A row of K router gradients may vanish by chance; it counts as one of usual size at least.
            errors = measure_errors(value, truth[tensor], row_floor=1.0 if tensor == "topk_weights" else 0.0)
            label = tensor if tensor == "y" else f"d{tensor}"
            rows.append(results.accuracy_row(case, label, errors, torch_errors[tensor]))
            print(f"{case:64} {label:14} {errors} torch={torch_errors[tensor]:.3e}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", default=str(results.ROOT / "results" / "reference-cpu.json"), help="file to write")
    parser.add_argument("--tokens", type=int, default=256, help="tokens (T), at least 1")
    arguments = parser.parse_args()
    rows = [row for name in generators.MODEL_SHAPES for row in rows_of_shape(name, arguments.tokens)]
    results.write(arguments.json, rows, env=results.environment("python scripts/reference_numbers.py"))
    print(f"wrote {arguments.json}: {len(rows)} rows")


if __name__ == "__main__":
    main()
