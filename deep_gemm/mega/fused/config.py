"""Variants of the fused kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deep_gemm import _C
from deep_gemm.gemm_config import BLOCK_K, BLOCK_M, D_TYPES, THREADS
from deep_gemm.jit import CppType, KernelSpec

NUM_STAGES, BLOCK_N = 4, _C.mega_moe_constants()["block_n"]
WGRAD_BOXES = 4  # of the staging that weight gradients leave through
UNIT_ROWS = 1024  # of one expert that a GEMM, and later the next one, takes in one go: with what passes between them they stay in the L2
LAG_WAVES = (
    1  # of a GEMM's tiles between a unit and the same unit of the next GEMM: with 0 tiles wait for each other, with 2 they leave the L2
)


@dataclass(frozen=True)
class FusedConfig:
    """One compiled variant. cluster: CTAs that share operand tiles; band: row blocks that sweep the columns together; wgrad_dtype: of the
    weight gradients, backward; None: forward."""

    cluster: int = 1
    band: int = 8
    wgrad_dtype: torch.dtype | None = None

    @property
    def direction(self) -> str:
        return "forward" if self.wgrad_dtype is None else "backward"

    @property
    def name(self) -> str:
        gradient = "" if self.wgrad_dtype is None else f"_dw_{D_TYPES[self.wgrad_dtype][0]}"
        return f"sm90_mega_moe_{self.direction}_bf16_pp{BLOCK_N}c{self.cluster}b{self.band}{gradient}"

    @property
    def smem_bytes(self) -> int:
        return _C.mega_moe_smem_bytes(self.direction == "backward", BLOCK_N, NUM_STAGES)

    def spec(self) -> KernelSpec:
        params = f"MegaMoe{self.direction.capitalize()}Params"
        gradient = {} if self.wgrad_dtype is None else {"D": CppType(D_TYPES[self.wgrad_dtype][1]), "kStagingBoxes": WGRAD_BOXES}
        return KernelSpec(
            name=self.name,
            header=f"deep_gemm/kernels/sm90_mega_moe_{self.direction}.cuh",
            entry=f"deep_gemm::kernels::sm90_mega_moe_{self.direction}",
            params=params,
            config={
                "Params": CppType(params),
                "kPingPong": True,
                "kCluster": self.cluster,
                "kBand": self.band,
                "kBlockM": BLOCK_M,
                "kBlockN": BLOCK_N,
                "kBlockK": BLOCK_K,
                "kNumStages": NUM_STAGES,
                **gradient,
            },
            threads=THREADS,
            arch="sm_90a",
        )

    def backward(self, wgrad_dtype: torch.dtype) -> FusedConfig:
        """The backward variant that goes with this one."""
        return replace(self, wgrad_dtype=wgrad_dtype)


ALONE, SHARED = FusedConfig(), FusedConfig(cluster=2, band=16)
WGRAD_DTYPES = (torch.bfloat16, torch.float32)
CONFIGS = [ALONE, SHARED]
BACKWARD_CONFIGS = [config.backward(dtype) for config in CONFIGS for dtype in WGRAD_DTYPES]


def choose_config(num_sms: int) -> FusedConfig:
    """Clusters of 2, where there are two SMs: as fast or faster for all shapes measured (docs/perf/mega_moe_forward.md)."""
    return ALONE if num_sms < SHARED.cluster else SHARED


def shipped_specs() -> list[KernelSpec]:
    return [config.spec() for config in CONFIGS + BACKWARD_CONFIGS]
