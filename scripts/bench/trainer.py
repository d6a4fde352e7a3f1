"""Training steps of a Qwen3-MoE of transformers: experts_implementation "mega_moe" against its own "grouped_mm". Time, memory, loss curves.

    python scripts/bench/trainer.py [--tokens 16384] [--layers 4] [--json results/trainer-transformers-h200.json]
    torchrun --nproc-per-node 2 scripts/bench/trainer.py ...     EP over all processes; the other side then runs grouped_mm + all-to-all
    python scripts/bench/trainer.py --plot results/x.json out.png

A step is forward, backward (full activation checkpointing) and AdamW; parameters, gradients and optimizer state are BF16, made on the device.
Both models have the same weights and batches: bytes of the standard library's sources. Three parts: peak memory of each model alone; step
times, one step of each in turn; losses of --loss-steps steps from the same start. Rows are those of results/, with "peak_memory_gib" or "losses".
Needs transformers >= 5 (EP: 5.24): scripts/bench/carry_transformers.sh for a machine without network.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import deep_gemm.integrations.transformers as integration
from deep_gemm.integrations._buffers import release_buffers
from deep_gemm.testing import MODEL_SHAPES, results, timing

OURS, THEIRS = "mega_moe", "grouped_mm"
AGREEMENT = 2e-2  # of the first losses: two BF16 results
HEADS = {"qwen3-30b": (32, 4, 128), "qwen3-235b": (64, 4, 128), "tiny": (4, 2, 32)}  # query, key/value, dimension


def configuration(options: argparse.Namespace, implementation: str) -> Qwen3MoeConfig:
    if options.shape == "tiny":
        hidden, intermediate, experts, topk = 128, 128, 8, 2
    else:
        shape = MODEL_SHAPES[options.shape]
        hidden, intermediate, experts, topk = shape.hidden, shape.intermediate_hidden, shape.num_experts, shape.num_topk
    heads, kv_heads, head_dim = HEADS[options.shape]
    return Qwen3MoeConfig(
        vocab_size=options.vocab,
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=topk,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        norm_topk_prob=True,
        max_position_embeddings=options.sequence,
        experts_implementation=implementation,
    )


class Trainer:
    """One model and its optimizer on this rank."""

    def __init__(self, options: argparse.Namespace, implementation: str, device: torch.device, text: torch.Tensor):
        self.options, self.device, self.text = options, device, text
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        torch.manual_seed(0)
        with device:
            self.model = Qwen3MoeForCausalLM._from_config(configuration(options, implementation), dtype=torch.bfloat16).train()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.undivided: list[torch.nn.Parameter] = []  # gradients that are sums over the ranks
        if self.world > 1:
            self._parallelize(implementation)
        elif implementation == OURS:
            integration.configure(self.model, num_max_tokens_per_rank=options.tokens)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr, foreach=True)
        self.index = 0

    def _parallelize(self, implementation: str) -> None:
        if implementation == OURS:
            mesh = init_device_mesh(self.device.type, (1, self.world), mesh_dim_names=("fsdp", "ep"))
            integration.shard_experts(self.model, mesh["ep"], num_max_tokens_per_rank=self.options.tokens)
            integration.apply_fsdp(self.model, mesh)
            return
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        mesh = init_device_mesh(self.device.type, (self.world, 1), mesh_dim_names=("ep", "tp"))
        plan = {}
        for name, _ in integration.experts_modules(self.model):
            plan |= {f"{name}.gate_up_proj": "grouped_gemm", f"{name}.down_proj": "grouped_gemm", name: "ep_dispatch_experts"}
        apply_expert_parallelism(self.model, mesh["ep"], mesh["tp"], plan, "all_to_all")
        self.undivided = [weight for _, experts in integration.experts_modules(self.model) for weight in experts.parameters()]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh["ep"], ignored_params=set(self.undivided))
        fully_shard(self.model, mesh=mesh["ep"], ignored_params=set(self.undivided))

    def batch(self) -> torch.Tensor:
        """[rows, sequence] of the text, a new one each time, the same for both models."""
        rows = self.options.tokens // self.options.sequence
        generator = torch.Generator().manual_seed(self.index * self.world + self.rank)
        self.index += 1
        begins = torch.randint(len(self.text) - self.options.sequence, (rows,), generator=generator)
        return torch.stack([self.text[begin : begin + self.options.sequence] for begin in begins.tolist()]).to(self.device)

    def step(self) -> torch.Tensor:
        """One training step; the loss of this rank's batch, on the device."""
        ids = self.batch()
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        for weight in self.undivided:
            weight.grad.div_(self.world)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def symmetric_bytes(self) -> int:
        """Memory of the buffer that torch's allocator does not count."""
        buffers = {
            id(state.buffer): state.buffer
            for _, experts in integration.experts_modules(self.model)
            if (state := experts.__dict__.get("_mega_moe"))
        }
        return sum(
            0 if buffer is None or buffer.symm is None or self.world == 1 else buffer.symm.tensor.nbytes for buffer in buffers.values()
        )


def synchronize(device: torch.device) -> None:
    if dist.is_initialized():
        dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def trainers(options: argparse.Namespace, implementations: list[str], device: torch.device, text: torch.Tensor):
    made = {name: Trainer(options, name, device, text) for name in implementations}
    yield made
    synchronize(device)
    made.clear()
    release_buffers()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory_gib(options: argparse.Namespace, implementation: str, device: torch.device, text: torch.Tensor) -> float | None:
    """Of three steps of this model alone, buffer included; the largest of the ranks. None without a GPU."""
    with trainers(options, [implementation], device, text) as made:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            made[implementation].step()
        synchronize(device)
        if device.type != "cuda":
            return None
        peak = (torch.cuda.max_memory_allocated() + made[implementation].symmetric_bytes()) / 2**30
    return over_ranks(peak, device, dist.ReduceOp.MAX)


def over_ranks(value: float, device: torch.device, operation) -> float:
    if not dist.is_initialized():
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation)
    return tensor.item()


def losses(options: argparse.Namespace, implementation: str, device: torch.device, text: torch.Tensor) -> list[float]:
    """Mean over the ranks, of every step."""
    with trainers(options, [implementation], device, text) as made:
        steps = [made[implementation].step() for _ in range(options.loss_steps)]
        world = made[implementation].world
        return [over_ranks(step.item(), device, dist.ReduceOp.SUM) / world for step in steps]


def measure(options: argparse.Namespace, device: torch.device) -> list[dict]:
    text = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60])), dtype=torch.uint8
    ).long()
    world, first = (dist.get_world_size(), dist.get_rank() == 0) if dist.is_initialized() else (1, True)
    report: Callable[[str], None] = lambda line: print(line, flush=True) if first else None
    case, notes = case_of(options, world), notes_of(options)
    rows, systems = [], [OURS, THEIRS]
    peaks = {system: peak_memory_gib(options, system, device, text) for system in systems}
    with trainers(options, systems, device, text) as made:
        steps = {name: trainer.step for name, trainer in made.items()}
        timed = timing.alternate(steps, warmups=options.warmups, calls=options.steps, before=lambda: synchronize(device))
        for system, result in timed.items():
            slowest = timing.Timing(
                *(over_ranks(value, device, dist.ReduceOp.MAX) for value in (result.median_ms, result.p10_ms, result.p90_ms))
            )
            rows.append(results.timing_row(case, system, "step", slowest, notes=notes) | {"peak_memory_gib": peaks[system]})
            report(f"{case:40} {system:10} {slowest.median_ms:9.2f} ms a step, peak {peaks[system] or 0:.2f} GiB")
    if options.loss_steps:
        rows += loss_rows(argparse.Namespace(**{**vars(options), "tokens": options.loss_tokens}), device, text, world, report)
    return rows


def loss_rows(
    options: argparse.Namespace, device: torch.device, text: torch.Tensor, world: int, report: Callable[[str], None]
) -> list[dict]:
    ours, theirs = (losses(options, system, device, text) for system in (OURS, THEIRS))
    apart = max(abs(mine - other) / other for mine, other in zip(ours, theirs))
    report(f"losses: first {ours[0]:.4f} / {theirs[0]:.4f}, last {ours[-1]:.4f} / {theirs[-1]:.4f}, apart at most {apart:.2%}")
    if not abs(ours[0] - theirs[0]) <= AGREEMENT * theirs[0]:
        raise SystemExit(f"the first losses are {ours[0]} and {theirs[0]}: expected those of the same model")
    described = {"case": case_of(options, world), "direction": "loss", "notes": notes_of(options)}
    return [described | {"system": system, "losses": curve} for system, curve in ((OURS, ours), (THEIRS, theirs))]


def case_of(options: argparse.Namespace, world: int) -> str:
    return f"{options.shape}-{options.layers}l/T{options.tokens}/EP{world}/bf16"


def notes_of(options: argparse.Namespace) -> str:
    return f"vocab {options.vocab}, sequence {options.sequence}, full activation checkpointing, AdamW; {options.notes}".rstrip("; ")


def plot(source: Path, target: Path) -> None:
    """Loss curves of a results file, overlaid."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for row in json.loads(source.read_text())["rows"]:
        if row["direction"] == "loss":
            axes.plot(row["losses"], label=f"{row['case']} {row['system']}", linestyle="-" if row["system"] == OURS else "--")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(HEADS), default="qwen3-30b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=32768, help="smaller than the model's: its logits alone would take the memory")
    parser.add_argument("--tokens", type=int, default=16384, help="of each rank and step")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each system")
    parser.add_argument("--loss-steps", type=int, default=100, help="0 = no loss curves")
    parser.add_argument("--loss-tokens", type=int, default=4096, help="of each rank and step of the loss curves")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--notes", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "PNG"))
    options = parser.parse_args()
    for name in ("tokens", "loss_tokens"):
        if getattr(options, name) % options.sequence:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: expected a multiple of --sequence {options.sequence}")
    return options


def main() -> None:
    options = arguments()
    if options.plot:
        plot(*options.plot)
        return
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None)
    rows = measure(options, device)
    if options.json and (world == 1 or dist.get_rank() == 0):
        results.merge(options.json, rows, key=("case", "system", "direction"), env=results.environment(num_gpus=world))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
