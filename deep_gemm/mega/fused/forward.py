"""One launch of the fused forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deep_gemm import _C
from deep_gemm.gemm_config import BLOCK_M
from deep_gemm.gemm_launch import operand_map
from deep_gemm.mega.fused.config import BLOCK_N, FusedConfig
from deep_gemm.mega.fused.launch import common_fields, gemm1_maps
from deep_gemm.mega.staged.call import Resources

if TYPE_CHECKING:
    from deep_gemm.mega.backend import Problem


def pack(resources: Resources, problem: Problem, y: Tensor, z: Tensor | None, config: FusedConfig, num_ctas: int) -> bytes:
    """The kernel's argument. y [T, H]; z [C, 2I] or None: not saved."""
    b2 = problem.b2
    return _C.pack(
        "MegaMoeForwardParams",
        **gemm1_maps(resources, problem, config),
        act_map=operand_map(resources.regions.act, "k", BLOCK_M // config.cluster),
        w2_map=operand_map(problem.w2, "k", BLOCK_N // config.cluster),
        **common_fields(resources, problem, config, num_ctas, z=z, out=y),
        b2=0 if b2 is None else b2.data_ptr(),
        b2_stride=0 if b2 is None else b2.stride(0),
        save_z=z is not None,
    )
