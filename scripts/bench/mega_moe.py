"""Times Mega MoE, forward and backward, ours against the trainer-style torch path, alternating in one run.

    python scripts/bench/mega_moe.py [--shape qwen3-30b] [--ep 1] [--tokens 16384] [--routing uniform] [--sustained-s 3] [--json results/x.json]

--ep N starts N processes, a GPU each. Weight gradients are BF16 on both sides. Directions: fwd; bwd after save="preact"; bwd_recompute. The
whole call is timed, between device events, after a barrier; results are checked against torch first. A rank's time is the slowest rank's.
Needs deep_gemm installed, or PYTHONPATH=. in the checkout.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import deep_gemm
from deep_gemm.testing import MODEL_SHAPES, ROUTINGS, assert_close, generators, results, timing
from deep_gemm.testing.torch_path import torch_moe

AGREEMENT = 2e-2  # relative Frobenius distance of two BF16 results


class Layer:
    """One rank's inputs and the calls to be timed."""

    def __init__(self, options: argparse.Namespace, rank: int, device: torch.device):
        shape, self.num_ranks, self.rank = MODEL_SHAPES[options.shape], options.ep, rank
        self.group = dist.group.WORLD if options.ep > 1 else None
        self.device = device
        count = shape.num_experts // options.ep
        self.x, self.dy = (generators.rows(options.tokens, shape.hidden, seed=2 * rank + s, device=self.device) for s in (0, 1))
        self.idx, self.p = generators.routing(
            options.routing, options.tokens, shape.num_experts, shape.num_topk, num_ranks=options.ep, rank=rank, device=self.device
        )
        mine = range(rank * count, (rank + 1) * count)
        self.w13, self.w2 = generators.expert_weights(mine, shape.hidden, shape.intermediate_hidden, device=self.device)
        sizes = (shape.num_experts, options.tokens, shape.num_topk, shape.hidden, shape.intermediate_hidden)
        self.buffer = deep_gemm.get_symm_buffer_for_mega_moe(self.group, *sizes, device=self.device)
        self.dw = {"dw13": torch.empty_like(self.w13), "dw2": torch.empty_like(self.w2)}
        self.flops = 6.0 * options.tokens * shape.num_topk * shape.hidden * shape.intermediate_hidden

    def ours(self, save: str, backend: str | None = None):
        return deep_gemm.mega_moe_fwd(self.x, self.idx, self.p, self.w13, self.w2, self.buffer, save=save, backend=backend)

    def ours_backward(self, state):
        return deep_gemm.mega_moe_bwd(self.dy, state, **self.dw)

    def leaves(self) -> list[torch.Tensor]:
        return [t.detach().requires_grad_() for t in (self.x, self.p, self.w13, self.w2)]

    def torch_path(self, leaves: list[torch.Tensor]) -> torch.Tensor:
        x, p, w13, w2 = leaves
        return torch_moe(x, self.idx, p, w13, w2, group=self.group, compiled=True)

    @torch.no_grad()
    def torch_forward(self) -> torch.Tensor:
        return self.torch_path([self.x, self.p, self.w13, self.w2])

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def check(self) -> None:
        leaves = self.leaves()
        y_torch = self.torch_path(leaves)
        grads = torch.autograd.grad(y_torch, leaves, self.dy)
        assert_close(self.ours("recompute", "fused")[0], y_torch.detach(), rel_frobenius=AGREEMENT, name="y, fused")
        y, state = self.ours("recompute")
        made = self.ours_backward(state)
        for name, actual, expected in zip(("y", "dx", "dp", "dw13", "dw2"), (y, *made), (y_torch, *grads), strict=True):
            assert_close(actual, expected.detach(), rel_frobenius=AGREEMENT, name=name)
        self.buffer.check()


def contests(layer: Layer):
    """(direction, {system: call}), made when they are due: the torch path's saved tensors are large."""
    fused = lambda: layer.ours("recompute", "fused")
    yield "fwd", {"fused": fused, "staged": lambda: layer.ours("recompute"), "torch": layer.torch_forward}
    leaves = layer.leaves()
    y = layer.torch_path(leaves)
    _, state = layer.ours("preact")
    torch_backward = lambda: torch.autograd.grad(y, leaves, layer.dy, retain_graph=True)
    _, fused_state = layer.ours("preact", "fused")
    fused_backward = lambda: in_one_launch(lambda: layer.ours_backward(fused_state))
    yield "bwd", {"fused": fused_backward, "staged": lambda: layer.ours_backward(state), "torch": torch_backward}
    del state
    _, state = layer.ours("recompute")
    _, fused_state = layer.ours("recompute", "fused")
    yield "bwd_recompute", {"fused": fused_backward, "staged": lambda: layer.ours_backward(state)}


def in_one_launch(call: Callable[[], object]) -> object:
    """`call`, with the backward of the fused backend in one launch."""
    os.environ["DG_FUSED_BACKWARD"] = "1"
    try:
        return call()
    finally:
        del os.environ["DG_FUSED_BACKWARD"]


def slowest(layer: Layer, measured: timing.Timing) -> timing.Timing:
    if layer.group is None:
        return measured
    values = torch.tensor([measured.median_ms, measured.p10_ms, measured.p90_ms], device=layer.device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return timing.Timing(*values.tolist())


def sustained(layer: Layer, fn: Callable[[], object], seconds: float, single_ms: float) -> float | None:
    """Equally many calls on every rank: the number comes from the slowest rank's single call."""
    return timing.sustained_calls(fn, calls=max(10, int(1e3 * seconds / single_ms))) if seconds else None


def run(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.cuda.set_device(rank)
    if options.ep > 1:
        dist.init_process_group(
            "nccl", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ep, device_id=torch.device("cuda", rank)
        )
    measure(Layer(options, rank, torch.device("cuda", rank)), options)
    if options.ep > 1:
        dist.destroy_process_group()


def measure(layer: Layer, options: argparse.Namespace) -> None:
    rows, rank = [], layer.rank
    layer.check()
    case = f"{options.shape}/T{options.tokens}/EP{options.ep}/bf16/{options.routing}"
    for direction, systems in contests(layer):
        for system, measured in timing.alternate(systems, before=layer.barrier).items():
            result = slowest(layer, measured)
            result = timing.with_sustained(result, sustained(layer, systems[system], options.sustained_s, result.median_ms))
            rows.append(
                results.timing_row(
                    case, system, direction, result, flops=layer.flops * (1 if direction == "fwd" else 2), notes=options.notes
                )
            )
            if rank == 0:
                print(f"{case:45} {direction:14} {system:7} {result.median_ms:8.3f} ms {rows[-1]['tflops']:6.0f} TFLOP/s", flush=True)
    if rank == 0 and options.json:
        results.merge(options.json, rows, key=("case", "system", "direction"), env=results.environment(num_gpus=options.ep))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(MODEL_SHAPES), default="qwen3-30b")
    parser.add_argument("--ep", type=int, default=1, help="processes, a GPU each")
    parser.add_argument("--tokens", type=int, default=16384, help="of each rank")
    parser.add_argument("--routing", choices=sorted(ROUTINGS), default="uniform")
    parser.add_argument("--sustained-s", type=float, default=0.0, help="seconds back to back of each system; 0 = none")
    parser.add_argument("--notes", default="")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ep:
        parser.error(f"--ep {options.ep}: this machine shows {torch.cuda.device_count()} GPUs")
    if options.ep == 1:
        run(0, options, "")
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (options, folder), nprocs=options.ep)


if __name__ == "__main__":
    main()
