"""One rank per process, a GPU each: the process, its part of a case, and how the processes are started and ended. For GPU tests and programs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

import deep_gemm
from deep_gemm.testing.moe_cases import MoeCase, Ranks, make_inputs


class Process:
    """One rank: its device, its group, and its part of tensors over all ranks."""

    def __init__(self, rank: int, size: int, device_type: str):
        self.rank, self.size, self.on_gpu = rank, size, device_type == "cuda"
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        self.accuracy: list[dict] = []

    def case(self, hidden=256, intermediate_hidden=128, num_experts=16, num_topk=4, tokens=(150, 97), **options) -> MoeCase:
        limit = 10**9 if self.on_gpu else 128
        shape = {"hidden": min(hidden, limit), "intermediate_hidden": min(intermediate_hidden, limit)}
        return MoeCase("processes", **shape, num_experts=num_experts, num_topk=num_topk, tokens=tokens[: self.size], **options)

    def share(self, case: MoeCase, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        begin, count = sum(case.tokens[: self.rank]), case.num_local_experts
        tokens, experts = slice(begin, begin + case.tokens[self.rank]), slice(self.rank * count, (self.rank + 1) * count)
        return {name: tensor[experts if name.startswith(("dw", "db")) else tokens] for name, tensor in tensors.items()}


class OneOfRanks(Ranks):
    """`Ranks` of which only one is in this process."""

    def __init__(self, process: Process, case: MoeCase):
        self.process, self.case, self.inputs, self.device = process, case, make_inputs(case, process.device), process.device
        self.group = dist.group.WORLD
        self.buffers = {process.rank: self._make_buffer(process.rank)}

    @property
    def here(self) -> list[int]:
        return [self.process.rank]

    def run(self, fn: Callable[[int], object]) -> list:
        return [fn(self.process.rank)]

    def _make_buffer(self, rank: int):
        c = self.case
        sizes = (c.num_experts, max(1, *c.tokens), c.num_topk, c.hidden, c.intermediate_hidden)
        return deep_gemm.get_symm_buffer_for_mega_moe(self.group, *sizes, device=self.device, capacity_factor=c.capacity_factor)

    def outputs(self) -> dict[str, torch.Tensor]:
        rank, buffer = self.process.rank, self.buffers[self.process.rank]
        self.poison()
        y, state = deep_gemm.mega_moe_fwd(*self.arguments(rank), **self.biases(rank), **self.case.call_options())
        self.poison()
        grads = deep_gemm.mega_moe_bwd(self.inputs.dy[rank], state)
        buffer.check()
        return {"y": y, "dx": grads.dx, "dp": grads.dtopk_weights, "dw13": grads.dw13, "dw2": grads.dw2}

    def poison(self) -> None:
        # Peers may still read what this rank published for the last call, and it is about to be overwritten.
        buffer = self.buffers[self.process.rank]
        if buffer.backend_name == "cuda":
            torch.cuda.synchronize()
            dist.barrier()
            buffer.backend("cuda").poison()
            torch.cuda.synchronize()
        dist.barrier()


@contextmanager
def in_group(rank: int, size: int, device_type: str, folder: str, *, timeout_s: float) -> Iterator[Process]:
    """This process as a rank of the default group, which meets in `folder`. timeout_s: DG_TIMEOUT_S."""
    os.environ["DG_TIMEOUT_S"] = f"{timeout_s:g}"
    process = Process(rank, size, device_type)
    options = {"backend": "gloo"}
    if process.on_gpu:
        torch.cuda.set_device(process.device)
        torch.backends.cuda.matmul.allow_tf32 = False
        options = {"backend": "nccl", "device_id": process.device}
    else:
        torch.set_num_threads(1)
    dist.init_process_group(init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=60), **options)
    try:
        yield process
    finally:
        dist.destroy_process_group()


def join(context, limit_s: float) -> str | None:
    """Why the processes of `mp.spawn(..., join=False)` did not all end well within limit_s; none is left running."""
    deadline = time.monotonic() + limit_s
    try:
        while not context.join(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                return f"the processes did not end in {limit_s:g} s"
    except Exception as error:  # noqa: BLE001 - a process died; what it had finished is in its file
        return str(error)
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return None
