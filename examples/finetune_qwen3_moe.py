"""Fine-tunes a small Qwen3-MoE with FSDP2 x expert parallelism, saves, and goes on at another EP size. CPU processes (gloo) or GPUs (NCCL).

    torchrun --nproc-per-node 4 examples/finetune_qwen3_moe.py --ep 2 --steps 20 --save out/checkpoint
    torchrun --nproc-per-node 4 examples/finetune_qwen3_moe.py --ep 4 --steps 20 --resume out/checkpoint

Needs transformers >= 5; data: the bytes of a module of the standard library. Without torchrun it is one process.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import deep_gemm.integrations.transformers as mega_moe

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def make_model(options: argparse.Namespace, device: torch.device, mesh) -> torch.nn.Module:
    torch.manual_seed(0)  # the same weights on every rank; from_pretrained(..., experts_implementation="mega_moe") as well
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, experts_implementation="mega_moe")).to(device).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    mega_moe.shard_experts(model, mesh["ep"], num_max_tokens_per_rank=options.batch * options.sequence)
    # FP32 parameters and optimizer, BF16 computation; micro-batches are summed and reduced in FP32.
    return mega_moe.apply_fsdp(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def batch_of(index: int, options: argparse.Namespace) -> torch.Tensor:
    """[batch, sequence] bytes of text, the same for the same index."""
    with open(argparse.__file__, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    begins = torch.randint(len(text) - options.sequence, (options.batch,), generator=torch.Generator().manual_seed(index))
    return torch.stack([text[begin : begin + options.sequence] for begin in begins.tolist()])


def train(options: argparse.Namespace, device: torch.device) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world // options.ep, options.ep), mesh_dim_names=("fsdp", "ep"))
    model = make_model(options, device, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    begin = load(options.resume, model, optimizer) if options.resume else 0
    losses = []
    for step in range(begin, begin + options.steps):
        total = torch.zeros((), device=device)
        for micro in range(options.accumulate):
            model.set_requires_gradient_sync(micro == options.accumulate - 1)
            ids = batch_of((step * options.accumulate + micro) * world + rank, options).to(device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / options.accumulate
            loss.backward()
            total += loss.detach()
        norm = mega_moe.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / world)
        if rank == 0:
            print(f"step {step}  loss {losses[-1]:.4f}  gradient norm {norm.item():.3f}", flush=True)
    if options.save:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)), step=begin + options.steps)
        dcp.save(state, checkpoint_id=options.save)
    return losses


def load(folder: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The next step. Written at any EP size: the checkpoint knows whole tensors."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)), step=0)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=1, help="ranks that share one set of experts; divides the number of processes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="rows of each rank and micro-batch")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--save", help="folder for the checkpoint after the last step")
    parser.add_argument("--resume", help="folder of a checkpoint, of any EP size")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.get_world_size() % options.ep:
        raise SystemExit(f"--ep {options.ep}: expected a divisor of the number of processes, {dist.get_world_size()}")
    train(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
