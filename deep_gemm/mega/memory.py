"""What a Mega MoE layer costs in memory, known before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deep_gemm.mega.backend import CUDA_BACKENDS
from deep_gemm.mega.buffer import MegaMoeSettings, resolve_backend_name
from deep_gemm.mega.checks import check_save

_BF16_BYTES, _REFERENCE_BYTES = 2, 4  # the reference backend keeps FP32


@dataclass(frozen=True)
class MegaMoeBytes:
    """Bytes of device memory of one rank. None of them depends on the routing.

    symmetric    the slab that peers read and write: once per buffer, so once for all layers that share it
    scratch      pool rows and plan: once per buffer
    saved        what a forward keeps until its backward, beyond the caller's own tensors (x, topk_idx, topk_weights, weights): once per forward
                 that waits for its backward
    activations  what the first half of a forward (GEMM 1) hands to the second (GEMM 2), freed when the forward returns
    """

    symmetric: int
    scratch: int
    saved: int
    activations: int

    @property
    def buffer(self) -> int:
        """What `get_symm_buffer_for_mega_moe` allocates."""
        return self.symmetric + self.scratch


def mega_moe_plan_bytes(
    num_ranks: int,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    save: str = "recompute",
    precision: str = "bf16",
    capacity_factor: float = 1.25,
    backend: str | None = None,
) -> MegaMoeBytes:
    """The memory of a layer whose buffer and calls have these arguments. Needs no GPU and allocates nothing.

    num_ranks    in place of the group of `get_symm_buffer_for_mega_moe`; the other arguments as there
    save         as in `mega_moe_fwd`
    backend      "cuda" | "fused" | "reference"; default "cuda"
    Raises       as get_symm_buffer_for_mega_moe for a bad setting
    Counted      calls of num_max_tokens_per_rank tokens with BF16 x and FP32 topk_weights. Not counted: y and the gradients, which the caller gets;
                 what the reference computes with; less than 1 KiB of pinned host memory; what CUDA takes for itself
    """
    if not isinstance(num_ranks, int) or isinstance(num_ranks, bool) or num_ranks < 1:
        raise ValueError(f"num_ranks = {num_ranks!r}: expected an int of at least 1")
    check_save(save)
    settings = MegaMoeSettings(
        num_experts=num_experts,
        num_ranks=num_ranks,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        num_topk=num_topk,
        hidden=hidden,
        intermediate_hidden=intermediate_hidden,
        precision=precision,
        capacity_factor=capacity_factor,
        backend=resolve_backend_name(backend, torch.device("cuda")),
    ).validate()
    return _cuda(settings, save) if settings.backend in CUDA_BACKENDS else _reference(settings, save)


def _cuda(settings: MegaMoeSettings, save: str) -> MegaMoeBytes:
    from deep_gemm.mega.staged.regions import layout_of

    layout, preact = layout_of(settings), save == "preact"
    pool_activations = _BF16_BYTES * layout.capacity_rows * settings.intermediate_hidden  # a [C, I]; z [C, 2I] is twice as large
    if settings.backend == "fused":  # a is y, of which B makes a copy, or nothing
        activations = _BF16_BYTES * settings.num_max_tokens_per_rank * settings.hidden if preact else 0
    else:
        activations = pool_activations
    return MegaMoeBytes(layout.symm_bytes, layout.scratch_bytes, 2 * pool_activations if preact else 0, activations)


def _reference(settings: MegaMoeSettings, save: str) -> MegaMoeBytes:
    entries = settings.num_max_tokens_per_rank * settings.num_topk
    activations = _REFERENCE_BYTES * entries * settings.intermediate_hidden
    return MegaMoeBytes(0, 0, 2 * activations if save == "preact" else 0, activations)
