"""The kernels around the GEMMs: what is compiled, and one launch by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from deep_gemm import _C, jit
from deep_gemm.jit import CppType, KernelSpec

ARCH = "sm_90a"
SCAN_THREADS = 1024  # one CTA, an expert per thread
CTAS_PER_SM = 4  # of the kernels that are limited by memory: 32 warps per SM, each with several loads in flight


@dataclass(frozen=True)
class Kernel:
    """One kernel: header kernels/mega_moe_<header>.cuh, entry mega_moe_<entry>, argument struct of layout/mega_moe_params.h."""

    header: str
    entry: str
    params: str
    threads: int = 256
    min_blocks: int = 1
    config: dict[str, CppType] = field(default_factory=dict)
    suffix: str = ""

    @property
    def spec(self) -> KernelSpec:
        return KernelSpec(
            name=f"mega_moe_{self.entry}{self.suffix}",
            header=f"deep_gemm/kernels/mega_moe_{self.header}.cuh",
            entry=f"deep_gemm::kernels::mega_moe_{self.entry}",
            params=self.params,
            config={"kThreads": self.threads, **self.config},
            threads=self.threads,
            arch=ARCH,
            min_blocks=self.min_blocks,
        )


KERNELS = {
    "copy": Kernel("publish", "copy", "MegaMoeCopyParams", min_blocks=CTAS_PER_SM),
    "route_count": Kernel("publish", "route_count", "MegaMoeRouteParams"),
    "route_offsets": Kernel("publish", "route_offsets", "MegaMoeRouteParams", threads=SCAN_THREADS),
    "route_scatter": Kernel("publish", "route_scatter", "MegaMoeRouteParams"),
    "barrier": Kernel("barrier", "barrier", "MegaMoeBarrierParams", threads=96),
    "plan": Kernel("plan", "plan", "MegaMoePlanParams", threads=SCAN_THREADS),
    "dispatch": Kernel("dispatch", "dispatch", "MegaMoeDispatchParams", min_blocks=CTAS_PER_SM),
    "swiglu": Kernel("swiglu", "swiglu", "MegaMoeSwigluParams", min_blocks=CTAS_PER_SM),
    "dswiglu": Kernel("swiglu", "dswiglu", "MegaMoeDswigluParams", min_blocks=3),  # 80 registers: gate, up, dA' and their gradients
    "push_bf16": Kernel(
        "combine", "push", "MegaMoePushParams", min_blocks=CTAS_PER_SM, config={"Row": CppType("__nv_bfloat16")}, suffix="_bf16"
    ),
    "push_f32": Kernel("combine", "push", "MegaMoePushParams", min_blocks=CTAS_PER_SM, config={"Row": CppType("float")}, suffix="_f32"),
    "combine": Kernel("combine", "combine", "MegaMoeCombineParams", min_blocks=CTAS_PER_SM),
    "bias_grad": Kernel("bias_grad", "bias_grad", "MegaMoeBiasGradParams", min_blocks=CTAS_PER_SM),
}


def shipped_specs() -> list[KernelSpec]:
    """Every kernel; none depends on the problem's shape."""
    return [kernel.spec for kernel in KERNELS.values()]


class Launcher:
    """The kernels loaded on one device. All are loaded at once: loading later could wait for a kernel that waits for a peer of this process."""

    def __init__(self, device_index: int):
        self._loaded = {name: jit.load(kernel.spec, device_index) for name, kernel in KERNELS.items()}

    def __call__(self, name: str, grid: int | tuple[int, ...], stream: int, *, smem_bytes: int = 0, **fields: object) -> None:
        """Launches `name` on `stream` with the struct's fields by name."""
        self._loaded[name].launch(_C.pack(KERNELS[name].params, **fields), grid, smem_bytes, stream)
