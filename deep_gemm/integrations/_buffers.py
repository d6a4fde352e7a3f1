"""One MegaMoeBuffer per (group, shape) and process, for trainers whose layers do not know each other.

shared_buffer(group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, **options) -> MegaMoeBuffer
    arguments of get_symm_buffer_for_mega_moe; what fits is found, else made (collective over the group)
find_buffer(...same...) -> MegaMoeBuffer | None
    never makes one: no collective
release_buffers()
    destroys them all, for tests and for a process that goes on after its model
"""

from __future__ import annotations

from typing import Any

import torch

from deep_gemm.mega.api import get_symm_buffer_for_mega_moe
from deep_gemm.mega.buffer import MegaMoeBuffer

# The group is part of the key by identity, and stays alive with it: names of process groups come again after destroy_process_group.
_buffers: dict[tuple, MegaMoeBuffer] = {}


def _key(
    group: Any,
    num_experts: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    device: torch.device | str | None = None,
    precision: str = "bf16",
    capacity_factor: float = 1.25,
    backend: str | None = None,
) -> tuple:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return group, num_experts, num_topk, hidden, intermediate_hidden, device, precision, capacity_factor, backend


def find_buffer(
    group: Any, num_experts: int, num_max_tokens_per_rank: int, num_topk: int, hidden: int, intermediate_hidden: int, **options: Any
) -> MegaMoeBuffer | None:
    """The buffer that `shared_buffer` made for this group and shape, if its bound on T is at least `num_max_tokens_per_rank`; else None."""
    buffer = _buffers.get(_key(group, num_experts, num_topk, hidden, intermediate_hidden, **options))
    return buffer if buffer is not None and buffer.num_max_tokens_per_rank >= num_max_tokens_per_rank else None


def shared_buffer(
    group: Any, num_experts: int, num_max_tokens_per_rank: int, num_topk: int, hidden: int, intermediate_hidden: int, **options: Any
) -> MegaMoeBuffer:
    """`find_buffer`, or a new buffer, which takes the place of a smaller one of the same group and shape.

    Arguments and errors as get_symm_buffer_for_mega_moe; options: device, precision, capacity_factor, backend. Making one is collective: every
    rank of `group` asks for the same buffers in the same order, so ask at set-up, not in the first forward (a checkpointed or compiled
    forward runs at other times on other ranks). A smaller buffer lives on in the layers and graphs that hold it.
    """
    found = find_buffer(group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, **options)
    if found is None:
        found = get_symm_buffer_for_mega_moe(group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden, **options)
        _buffers[_key(group, num_experts, num_topk, hidden, intermediate_hidden, **options)] = found
    return found


def release_buffers() -> None:
    """Destroy every shared buffer. On every rank, after the last call on them; layers that still hold one raise at their next call."""
    while _buffers:
        _buffers.popitem()[1].destroy()
