"""One launch of the fused backward (docs/fused_backward.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deep_gemm import _C
from deep_gemm.gemm_config import BLOCK_M
from deep_gemm.gemm_launch import gated_halves, operand_map, result_map
from deep_gemm.mega.fused.config import FusedConfig
from deep_gemm.mega.fused.launch import common_fields, gate_and_up, gemm1_maps
from deep_gemm.mega.staged.backward import Wanted
from deep_gemm.mega.staged.call import Resources

if TYPE_CHECKING:
    from deep_gemm.mega.backend import Gradients, Problem, WeightGrads

_WEIGHT_OFFSET, _META_BYTES = 12, 16  # of MegaMoeRowMeta


def wgrad_dtype(grads: WeightGrads) -> torch.dtype | None:
    """The one type of all weight gradients, or None: they differ."""
    found = {t.dtype for t in (*(grads.dw13 or ()), grads.dw2) if t is not None} or {grads.dtype}
    if any(part is None for part in (grads.dw2, grads.dw13)):
        found |= {grads.dtype}
    return found.pop() if len(found) == 1 else None


def can_run(problem: Problem, wanted: Wanted, grads: WeightGrads) -> bool:
    """What the launch does not have: expert biases, a gradient of W2 alone (no dZ is needed then), weight gradients of two types."""
    return problem.b13 is None and wanted.dz and wgrad_dtype(grads) is not None


def _target(name: str, d: Tensor | None, carry: tuple[Tensor, Tensor] | None, accumulate: bool) -> dict[str, object]:
    """Fields of DG_WGRAD_TARGET for a gradient [E_l, m, n]. carry: the f32 [m, n] that even rounds read, and write."""
    if d is None:
        numbers = dict.fromkeys(("", "_carry_in", "_carry_out", "_ldd", "_group_stride", "_n", "_accumulate", "_has_map", "_unused"), 0)
        return {f"{name}_map": bytes(128), **{f"{name}{field}": value for field, value in numbers.items()}}
    d_map = result_map(d)
    return {
        f"{name}_map": d_map or bytes(128),
        name: d.data_ptr(),
        f"{name}_carry_in": 0 if carry is None else carry[0].data_ptr(),
        f"{name}_carry_out": 0 if carry is None else carry[1].data_ptr(),
        f"{name}_ldd": d.stride(-2),
        f"{name}_group_stride": d.stride(0),
        f"{name}_n": d.shape[-1],
        f"{name}_accumulate": accumulate,
        f"{name}_has_map": d_map is not None,
        f"{name}_unused": 0,
    }


def _targets(resources: Resources, problem: Problem, made: Gradients, accumulate: bool) -> dict[str, object]:
    regions, width = resources.regions, problem.buffer.intermediate_hidden
    halves: tuple = (None, None) if made.dw13 is None else gate_and_up(made.dw13, width)
    carries: tuple = (None, None, None)
    if regions.carry2 is not None:
        parts = (regions.carry2, regions.carry13[:, :width], regions.carry13[:, width:])
        carries = tuple((part[1], part[0]) for part in parts)
    fields = {}
    for name, d, carry in zip(("dw2", "dw_gate", "dw_up"), (made.dw2, *halves), carries, strict=True):
        fields |= _target(name, d, carry, accumulate)
    return fields


def _operand_maps(resources: Resources, problem: Problem, config: FusedConfig) -> dict[str, bytes]:
    regions, width = resources.regions, problem.buffer.intermediate_hidden
    (x, dy), z = regions.rows, regions.z
    gate, up = gate_and_up(problem.w13, width)
    rows = {"dy": dy, "dz_gate": z[:, :width], "dz_up": z[:, width:], "x": x, "act": regions.act}
    return {
        "dy_map": operand_map(dy, "k", BLOCK_M // config.cluster),
        **{f"{name}_k_map": operand_map(rows[name], "k", BLOCK_M // config.cluster) for name in ("dz_gate", "dz_up")},
        **{f"{name}_rows_map": operand_map(tensor.t(), "mn", 0) for name, tensor in rows.items()},
        **{f"{name}_t_map": operand_map(t.transpose(1, 2), "mn", 0) for name, t in (("gate", gate), ("up", up), ("w2", problem.w2))},
    }


def pack(
    resources: Resources,
    problem: Problem,
    dy: Tensor,
    saved_z: Tensor | None,
    wanted: Wanted,
    made: Gradients,
    accumulate: bool,
    config: FusedConfig,
    num_ctas: int,
) -> bytes:
    """The kernel's argument. saved_z [C, 2I]: z of the first round, or None: recomputed."""
    regions = resources.regions
    return _C.pack(
        "MegaMoeBackwardParams",
        **gemm1_maps(resources, problem, config),
        **_operand_maps(resources, problem, config),
        **gated_halves("z", regions.z if saved_z is None else saved_z),
        **gated_halves("z_again", regions.z),
        **_targets(resources, problem, made, accumulate),
        **common_fields(resources, problem, config, num_ctas, z=regions.z, out=made.dx, detail=wanted.detail)
        | {"row_weight": regions.scratch("row_meta") + _WEIGHT_OFFSET, "row_weight_stride": _META_BYTES},
        dy_offset=regions.offset("dy"),
        weights_offset=regions.offset("weights"),
        dp_offset=regions.offset("dp"),
        dy=dy.data_ptr(),
        dy_rows=regions.rows[1].data_ptr(),
        dp_slots=regions.own("dp"),
        dp_out=0 if made.dtopk_weights is None else made.dtopk_weights.data_ptr(),
        row_dp=regions.scratch("row_dp"),
        row_dp_stride=resources.layout.capacity_rows,
        saved_rounds=saved_z is not None,
        wants_dx=wanted.x,
        wants_dp=wanted.topk_weights,
        wants_dw2=wanted.w2,
        wants_dw13=wanted.w13,
        accumulate=accumulate,
    )
