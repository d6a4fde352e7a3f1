"""Variants of the fused forward kernel."""

from __future__ import annotations

from dataclasses import dataclass

from deep_gemm import _C
from deep_gemm.gemm_config import BLOCK_K, BLOCK_M, LONG_K, THREADS
from deep_gemm.jit import CppType, KernelSpec

NUM_STAGES, BLOCK_N = 4, 192
SWIGLU_BOXES = 3  # staging of the SwiGLU epilogue
UNIT_ROWS = 1024  # of one expert that GEMM 1, and later GEMM 2, takes in one go: with their activations they stay in the L2
LAG_WAVES = 2  # of GEMM 1 tiles between the GEMM 1 and the GEMM 2 of a unit: the epilogue's stores have long landed


@dataclass(frozen=True)
class ForwardConfig:
    """One compiled variant. cluster: CTAs that share operand tiles; band: row blocks that sweep the columns together."""

    cluster: int = 1
    band: int = 8

    @property
    def name(self) -> str:
        return f"sm90_mega_moe_forward_bf16_pp{BLOCK_N}c{self.cluster}b{self.band}"

    @property
    def smem_bytes(self) -> int:
        return _C.mega_moe_forward_smem_bytes(BLOCK_N, NUM_STAGES)

    def spec(self) -> KernelSpec:
        return KernelSpec(
            name=self.name,
            header="deep_gemm/kernels/sm90_mega_moe_forward.cuh",
            entry="deep_gemm::kernels::sm90_mega_moe_forward",
            params="MegaMoeForwardParams",
            config={
                "Params": CppType("MegaMoeForwardParams"),
                "kPingPong": True,
                "kCluster": self.cluster,
                "kBand": self.band,
                "kBlockM": BLOCK_M,
                "kBlockN": BLOCK_N,
                "kBlockK": BLOCK_K,
                "kNumStages": NUM_STAGES,
                "kStagingBoxes": SWIGLU_BOXES,
            },
            threads=THREADS,
            arch="sm_90a",
        )


ALONE, SHARED = ForwardConfig(), ForwardConfig(cluster=2, band=16)
CONFIGS = [ALONE, SHARED]


def choose_config(hidden: int, num_sms: int) -> ForwardConfig:
    """As the GEMMs were measured apart (gemm_table.json): clusters of 2, but for a long contraction in GEMM 1."""
    return ALONE if num_sms < SHARED.cluster or hidden >= LONG_K else SHARED


def shipped_specs() -> list[KernelSpec]:
    return [config.spec() for config in CONFIGS]
