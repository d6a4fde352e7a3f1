"""Arguments that both fused launches take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deep_gemm import _C
from deep_gemm.gemm_config import BLOCK_M
from deep_gemm.gemm_launch import gate_up_fields, operand_map
from deep_gemm.mega.fused.config import BLOCK_N, LAG_WAVES, UNIT_ROWS, FusedConfig
from deep_gemm.mega.staged.call import Resources, activation_fields

if TYPE_CHECKING:
    from deep_gemm.mega.backend import Problem

_CONSTANTS = _C.mega_moe_constants()
_PHASES = {name: index for index, name in enumerate(_CONSTANTS["phases"])}
_SYMMETRIC = ("signals", "id_fault", "expert_offsets", "src_list", "places", "x", "combine")
_SCRATCH = ("slot_expert", "row_meta", "group_ends", "segment_begin", "segment_source", "cta_counts", "ready", "grid", "control")
_FUSED_TAG = 4
"""Detail of a barrier's tag that tells fused launches from staged ones, beside what the backward's ranks must agree on."""


def gate_and_up(parts: tuple[Tensor, ...], width: int) -> tuple[Tensor, Tensor]:
    """The halves of a tensor over gate and up, [E_l, 2I, H] or a pair of [E_l, I, H]."""
    return (parts[0], parts[1]) if len(parts) == 2 else (parts[0][:, :width], parts[0][:, width:])


def gemm1_maps(resources: Resources, problem: Problem, config: FusedConfig) -> dict[str, bytes]:
    gate, up = gate_and_up(problem.w13, problem.buffer.intermediate_hidden)
    return {
        "x_map": operand_map(resources.regions.rows[0], "k", BLOCK_M // config.cluster),
        "gate_map": operand_map(gate, "k", BLOCK_N // 2),
        "up_map": operand_map(up, "k", BLOCK_N // 2),
    }


def common_fields(
    resources: Resources, problem: Problem, config: FusedConfig, num_ctas: int, *, z: Tensor | None, out: Tensor | None, detail: int = 0
) -> dict[str, object]:
    """z [C, 2I]: what is written of gate and up, or None. out [T, H] or None: not made. detail: what all ranks' calls must have in common."""
    buffer, regions, layout = problem.buffer, resources.regions, resources.layout
    detail = (_FUSED_TAG | detail) << _CONSTANTS["tag_detail_shift"]
    return {
        "d": regions.act.data_ptr(),
        "ldd": regions.act.stride(0),
        **gate_up_fields(z),
        **activation_fields(problem),
        "row_weight": 0,
        "row_weight_stride": 0,
        "symm": regions.peers,
        **{f"{name}_offset": regions.offset(name) for name in _SYMMETRIC},
        **{name: regions.scratch(name) for name in _SCRATCH},
        "x": problem.x.data_ptr(),
        "topk_idx": problem.topk_idx.data_ptr(),
        "weights": problem.topk_weights.data_ptr(),
        "out": 0 if out is None else out.data_ptr(),
        "slots": regions.own("combine"),
        "x_rows": regions.rows[0].data_ptr(),
        "faults": resources.faults.address,
        "timeout_ns": int(resources.timeout_s * 1e9),
        "publish_tag": _PHASES[f"{config.direction}_publish"] | detail,
        "push_tag": _PHASES[f"{config.direction}_push"] | detail,
        "rank": buffer.rank,
        "num_ranks": buffer.num_ranks,
        "num_tokens": problem.x.shape[0],
        "num_topk": buffer.num_topk,
        "idx_bytes": problem.topk_idx.element_size(),
        "num_experts": buffer.num_experts,
        "num_local_experts": buffer.num_local_experts,
        "hidden": buffer.hidden,
        "n": buffer.intermediate_hidden,
        "capacity_rows": layout.capacity_rows,
        "num_blocks": layout.worst_rows // _CONSTANTS["row_align"],
        "unit_rows": UNIT_ROWS,
        "lag_tiles": LAG_WAVES * (num_ctas // config.cluster),
    }
