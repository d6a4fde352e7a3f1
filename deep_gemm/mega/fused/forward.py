"""One launch of the fused forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deep_gemm import _C
from deep_gemm.gemm_config import BLOCK_M
from deep_gemm.gemm_launch import gated_halves, gated_map, operand_map
from deep_gemm.mega.fused.config import BLOCK_N, LAG_WAVES, UNIT_ROWS, ForwardConfig
from deep_gemm.mega.staged.call import Resources, activation_fields

if TYPE_CHECKING:
    from deep_gemm.mega.backend import Problem

_ROW_ALIGN = _C.mega_moe_constants()["row_align"]
_SYMMETRIC = ("signals", "id_fault", "expert_offsets", "src_list", "places", "x", "combine")
_SCRATCH = (
    "slot_expert",
    "row_meta",
    "group_ends",
    "segment_begin",
    "segment_source",
    "cta_counts",
    "x_ready",
    "act_ready",
    "grid",
    "control",
)


def pack(resources: Resources, problem: Problem, y: Tensor, z: Tensor | None, config: ForwardConfig, num_ctas: int) -> bytes:
    """The kernel's argument. y [T, H]; z [C, 2I] or None: not saved."""
    buffer, regions, layout = problem.buffer, resources.regions, resources.layout
    width = buffer.intermediate_hidden
    gate, up = problem.w13 if len(problem.w13) == 2 else (problem.w13[0][:, :width], problem.w13[0][:, width:])
    z_maps = {"z_gate_map": bytes(128), "z_up_map": bytes(128)} if z is None else gated_halves("z", z)
    b2 = problem.b2
    return _C.pack(
        "MegaMoeForwardParams",
        x_map=operand_map(regions.rows[0], "k", BLOCK_M // config.cluster),
        act_map=operand_map(regions.act, "k", BLOCK_M // config.cluster),
        gate_map=operand_map(gate, "k", BLOCK_N // 2),
        up_map=operand_map(up, "k", BLOCK_N // 2),
        w2_map=operand_map(problem.w2, "k", BLOCK_N // config.cluster),
        d_map=gated_map(regions.act),
        **z_maps,
        **activation_fields(problem),
        row_weight=0,
        row_weight_stride=0,
        b2=0 if b2 is None else b2.data_ptr(),
        b2_stride=0 if b2 is None else b2.stride(0),
        symm=regions.peers,
        **{f"{name}_offset": regions.offset(name) for name in _SYMMETRIC},
        **{name: regions.scratch(name) for name in _SCRATCH},
        x=problem.x.data_ptr(),
        topk_idx=problem.topk_idx.data_ptr(),
        weights=problem.topk_weights.data_ptr(),
        out=y.data_ptr(),
        slots=regions.own("combine"),
        x_rows=regions.rows[0].data_ptr(),
        faults=resources.faults.address,
        timeout_ns=int(resources.timeout_s * 1e9),
        rank=buffer.rank,
        num_ranks=buffer.num_ranks,
        num_tokens=problem.x.shape[0],
        num_topk=buffer.num_topk,
        idx_bytes=problem.topk_idx.element_size(),
        num_experts=buffer.num_experts,
        num_local_experts=buffer.num_local_experts,
        hidden=buffer.hidden,
        n=width,
        capacity_rows=layout.capacity_rows,
        num_blocks=layout.worst_rows // _ROW_ALIGN,
        unit_rows=UNIT_ROWS,
        lag_tiles=LAG_WAVES * (num_ctas // config.cluster),
        save_z=z is not None,
    )
