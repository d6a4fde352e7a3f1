"""The steps of a call, as launches on the current stream. Formulas and order: docs/design.md; who may read and write what when:
docs/memory_order.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deep_gemm import _C, gemm_launch
from deep_gemm.mega.staged.faults import FaultRecords
from deep_gemm.mega.staged.kernels import CTAS_PER_SM, Launcher
from deep_gemm.mega.staged.regions import Layout, Regions

if TYPE_CHECKING:
    from deep_gemm.mega.backend import Problem

_CONSTANTS = _C.mega_moe_constants()
_PHASES = {name: index for index, name in enumerate(_CONSTANTS["phases"])}
_BIAS_COLUMNS = 256  # columns of one CTA of the bias gradient


@dataclass
class Resources:
    """What a rank keeps between calls. num_sms: CTAs of the GEMMs, which the other grids follow; None = as many as `set_num_sms` says."""

    layout: Layout
    regions: Regions
    launch: Launcher
    faults: FaultRecords
    num_sms: int | None
    timeout_s: float


class Call:
    """One forward or backward of one rank, on the current stream."""

    def __init__(self, resources: Resources, problem: Problem):
        self._res, self._problem = resources, problem
        self.layout, self.regions = resources.layout, resources.regions
        buffer = problem.buffer
        self._device = buffer.device
        self._num_ranks, self._rank = buffer.num_ranks, buffer.rank
        self._num_local, self._hidden, self._width = buffer.num_local_experts, buffer.hidden, buffer.intermediate_hidden
        self._stream = current_stream(buffer.device)
        self._num_sms = resources.num_sms or gemm_launch.get_num_sms(buffer.device.index)
        self._row_grid = self._num_sms * CTAS_PER_SM

    def _launch(self, name: str, grid: int | tuple[int, ...], *, smem_bytes: int = 0, **fields: object) -> None:
        self._res.launch(name, grid, self._stream, smem_bytes=smem_bytes, **fields)

    def window(self, index: int) -> tuple[int, int]:
        """Virtual rows of round `index`."""
        rows = self.layout.capacity_rows
        return index * rows, (index + 1) * rows

    def _window_fields(self, index: int) -> dict[str, int]:
        begin, end = self.window(index)
        group_ends = self.regions.scratch("group_ends")
        return {"group_ends": group_ends, "num_local_experts": self._num_local, "window_begin": begin, "window_rows": end - begin}

    # ---- exchange ------------------------------------------------------------------------------------------------------------------

    def publish(self, phase: str, dy: Tensor | None = None, detail: int = 0) -> None:
        """Shows x (and dy) and the routing to all ranks, waits for theirs, and plans where their rows go."""
        # Peers may still be reading what this rank published for a call whose second half never came (checkpointing runs A alone).
        self.barrier("reuse", only_if_pending=True, pending_after=False)
        self._copy_rows(dy)
        self._route()
        self.barrier(phase, pending_after=True, detail=detail)
        self._plan()

    def _copy_rows(self, dy: Tensor | None) -> None:
        x, regions = self._problem.x, self.regions
        num_vectors = x.numel() // 8  # of 16 bytes
        if num_vectors == 0:
            return
        self._launch(
            "copy",
            min(self._row_grid, -(-num_vectors // 256)),
            first=x.data_ptr(),
            first_out=regions.own("x"),
            second=0 if dy is None else dy.data_ptr(),
            second_out=regions.own("dy"),
            control=regions.scratch("control"),
            num_vectors=num_vectors,
        )

    def _route(self) -> None:
        problem, regions, layout = self._problem, self.regions, self.layout
        num_entries = problem.topk_idx.numel()
        num_blocks = -(-num_entries // _CONSTANTS["route_block"])
        fields = {
            "topk_idx": problem.topk_idx.data_ptr(),
            "topk_weights": problem.topk_weights.data_ptr(),
            "slot_expert": regions.scratch("slot_expert"),
            "weights": regions.own("weights"),
            "expert_offsets": regions.own("expert_offsets"),
            "src_list": regions.own("src_list"),
            "block_counts": regions.scratch("block_counts"),
            "id_fault": regions.own("id_fault"),
            "control": regions.scratch("control"),
            "num_entries": num_entries,
            "num_blocks": num_blocks,
            "num_experts": problem.buffer.num_experts,
            "idx_bytes": problem.topk_idx.element_size(),
        }
        if num_blocks:
            self._launch("route_count", num_blocks, smem_bytes=layout.route_smem_bytes // _CONSTANTS["route_warps"], **fields)
        self._launch("route_offsets", 1, **fields)
        if num_blocks:
            self._launch("route_scatter", num_blocks, smem_bytes=layout.route_smem_bytes, **fields)

    def barrier(self, phase: str, *, pending_after: bool, only_if_pending: bool = False, detail: int = 0) -> None:
        """Waits for all ranks; what each wrote before is visible after. Nothing to do for one rank: the stream orders its own kernels."""
        if self._num_ranks == 1:
            return
        self._launch(
            "barrier",
            1,
            symm=self.regions.peers,
            signals_offset=self.regions.offset("signals"),
            control=self.regions.scratch("control"),
            faults=self._res.faults.address,
            timeout_ns=int(self._res.timeout_s * 1e9),
            tag=_PHASES[phase] | detail << _CONSTANTS["tag_detail_shift"],
            rank=self._rank,
            num_ranks=self._num_ranks,
            only_if_pending=only_if_pending,
            pending_after=pending_after,
        )

    def _plan(self) -> None:
        regions = self.regions
        self._launch(
            "plan",
            1,
            symm=regions.peers,
            expert_offsets_offset=regions.offset("expert_offsets"),
            id_fault_offset=regions.offset("id_fault"),
            group_ends=regions.scratch("group_ends"),
            segment_begin=regions.scratch("segment_begin"),
            segment_source=regions.scratch("segment_source"),
            control=regions.scratch("control"),
            faults=self._res.faults.address,
            rank=self._rank,
            num_ranks=self._num_ranks,
            num_local_experts=self._num_local,
        )

    def dispatch(self, index: int, *, x: bool, dy: bool = False) -> None:
        """Row meta of round `index`, and the rows of x into rows[0], of dy into rows[1]."""
        regions = self.regions
        self._launch(
            "dispatch",
            self._row_grid,
            smem_bytes=4 * self._problem.buffer.num_experts,
            symm=regions.peers,
            x_offset=regions.offset("x"),
            dy_offset=regions.offset("dy"),
            src_list_offset=regions.offset("src_list"),
            weights_offset=regions.offset("weights"),
            x_rows=regions.rows[0].data_ptr() if x else 0,
            dy_rows=regions.rows[1].data_ptr() if dy else 0,
            row_meta=regions.scratch("row_meta"),
            segment_begin=regions.scratch("segment_begin"),
            segment_source=regions.scratch("segment_source"),
            num_ranks=self._num_ranks,
            num_topk=self._problem.buffer.num_topk,
            hidden=self._hidden,
            **self._window_fields(index),
        )

    def push(self, index: int, rows: Tensor | None, *, bias: Tensor | None = None, dp: bool = False) -> None:
        """Rows [C, H] (BF16 or FP32, with the expert's bias) into the slots of their tokens' owners, and dp beside them."""
        regions = self.regions
        self._launch(
            "push_f32" if rows is not None and rows.dtype == torch.float32 else "push_bf16",
            self._row_grid,
            symm=regions.peers,
            combine_offset=regions.offset("combine"),
            dp_offset=regions.offset("dp"),
            rows=0 if rows is None else rows.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            row_dp=regions.scratch("row_dp") if dp else 0,
            row_meta=regions.scratch("row_meta"),
            hidden=self._hidden,
            **self._window_fields(index),
        )

    def combine(self, out: Tensor | None, *, weighted: bool, dp_out: Tensor | None = None) -> None:
        """out[t] = sum over the slots of t, times their routing weights if `weighted`; dp_out [T, K] from the pushed dp."""
        num_tokens, num_topk = self._problem.topk_idx.shape
        if num_tokens == 0:
            return
        regions = self.regions
        self._launch(
            "combine",
            min(self._row_grid, -(-max(num_tokens * self._hidden // 8, num_tokens * num_topk) // 256)),
            slots=regions.own("combine"),
            weights=regions.own("weights") if weighted else 0,
            slot_expert=regions.scratch("slot_expert"),
            out=0 if out is None else out.data_ptr(),
            dp_slots=regions.own("dp"),
            dp_out=0 if dp_out is None else dp_out.data_ptr(),
            control=regions.scratch("control"),
            num_tokens=num_tokens,
            num_topk=num_topk,
            hidden=self._hidden,
        )

    # ---- experts -------------------------------------------------------------------------------------------------------------------

    def m_grouped(self, index: int, a: Tensor, b: Tensor, d: Tensor, b_major: str, accumulate: bool = False) -> None:
        """d[rows] (+)= a[rows] @ the weight of the rows' expert; b as in gemm_launch.launch_m_grouped."""
        gemm_launch.launch_m_grouped(
            a,
            b,
            d,
            self.regions.group_ends,
            b_major=b_major,
            window=self.window(index),
            accumulate=accumulate,
            num_sms=self._num_sms,
            stream=self._stream,
        )

    def k_grouped(self, index: int, a: Tensor, b: Tensor, d: Tensor, *, carry: Tensor | None, accumulate: bool) -> None:
        """d[e] (+)= a[rows of e]^T @ b[rows of e]. `carry`: FP32 memory for the expert that a window cuts, used when d is BF16."""
        gemm_launch.launch_k_grouped(
            a,
            b,
            d,
            self.regions.group_ends,
            window=self.window(index),
            carry=carry if d.dtype == torch.bfloat16 else None,
            accumulate=accumulate,
            num_sms=self._num_sms,
            stream=self._stream,
        )

    def halves(self, z: Tensor) -> tuple[Tensor, ...]:
        """z [C, 2I] as w13 is split: whole, or its gate and up columns."""
        return (z,) if len(self._problem.w13) == 1 else (z[:, : self._width], z[:, self._width :])

    def gemm1(self, index: int, z: Tensor) -> None:
        """z = x rows @ w13^T."""
        for weight, part in zip(self._problem.w13, self.halves(z), strict=True):
            self.m_grouped(index, self.regions.rows[0], weight, part, "k")

    def _activation_fields(self, z: Tensor) -> dict[str, object]:
        fields = activation_fields(self._problem)
        return {"z": z.data_ptr(), "row_meta": self.regions.scratch("row_meta"), "intermediate_hidden": self._width, **fields}

    def swiglu(self, index: int, z: Tensor, a: Tensor, *, weighted: bool = False) -> None:
        """a = activation(z + b13), times the routing weight if `weighted`."""
        self._launch(
            "swiglu", self._row_grid, a=a.data_ptr(), weighted=weighted, **self._activation_fields(z), **self._window_fields(index)
        )

    def dswiglu(self, index: int, z: Tensor) -> None:
        """act (dA') -> act (A' = p * a), regions.z = dZ, row_dp; z may be regions.z."""
        regions, b2 = self.regions, self._problem.b2
        self._launch(
            "dswiglu",
            self._row_grid,
            act=regions.act.data_ptr(),
            dz=regions.z.data_ptr(),
            row_dp=regions.scratch("row_dp"),
            dy=regions.rows[1].data_ptr(),
            b2=0 if b2 is None else b2.data_ptr(),
            hidden=self._hidden,
            **self._activation_fields(z),
            **self._window_fields(index),
        )

    def bias_grad(self, index: int, rows: Tensor, sums: Tensor, out: Tensor, *, weighted: bool, accumulate: bool) -> None:
        """out [E_l, columns] (+)= column sums per expert of rows [C, columns], times the routing weight if `weighted`; written in the last round."""
        columns = rows.shape[1]
        begin, end = self.window(index)
        self._launch(
            "bias_grad",
            (-(-columns // _BIAS_COLUMNS), self._num_local),
            rows=rows.data_ptr(),
            row_meta=self.regions.scratch("row_meta"),
            group_ends=self.regions.scratch("group_ends"),
            sums=sums.data_ptr(),
            out=out.data_ptr(),
            row_stride=rows.stride(0),
            columns=columns,
            window_begin=begin,
            window_rows=end - begin,
            weighted=weighted,
            first=index == 0,
            last=index == self.layout.rounds - 1,
            out_is_f32=out.dtype == torch.float32,
            accumulate=accumulate,
        )


def activation_fields(problem: Problem) -> dict[str, object]:
    """The activation of GEMM 1 as kernels take it: biases by address, 0 = none."""
    activation, gate_bias, up_bias, stride = problem.activation, 0, 0, 0
    if problem.b13 is not None:
        first = problem.b13[0]
        gate_bias, stride = first.data_ptr(), first.stride(0)
        up_bias = problem.b13[1].data_ptr() if len(problem.b13) == 2 else gate_bias + problem.buffer.intermediate_hidden * first.element_size()
    return {
        "gate_bias": gate_bias,
        "up_bias": up_bias,
        "bias_stride": stride,
        "alpha": activation.alpha,
        "up_offset": activation.up_offset,
        "clamp": activation.clamp,
    }


def current_stream(device: torch.device) -> int:
    """Handle of the stream that a call runs on."""
    return torch.cuda.current_stream(device).cuda_stream
