"""GEMMs through gemm_launch on the SIMT machine: the launches as shipped, in place of the JIT's kernels those of `HopperKernel`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deep_gemm import gemm_launch
from deep_gemm.gemm_config import TILES, GemmConfig

from .driver import tensor_maps
from .machine import FORWARD, INCLUDE, HopperKernel

GROUP_ALIGNMENT = gemm_launch.GROUP_ALIGNMENT


class SimtGemms:
    """Compiles every variant once, into `folder`. `order`, `timeout_s`: of the launches that follow; `tile`: of all problems."""

    def __init__(self, folder: Path, include: Path = INCLUDE):
        self._folder, self._include, self._kernels = folder, include, {}
        self.order, self.timeout_s, self.tile = FORWARD, 20.0, "pp192c1b8"

    def kernel(self, config: GemmConfig, device: object) -> SimtGemms._Launched:
        return SimtGemms._Launched(self, config)

    class _Launched:
        def __init__(self, gemms: SimtGemms, config: GemmConfig):
            self._gemms, self._config = gemms, config

        def launch(self, *args, **kwargs) -> None:
            gemms, name = self._gemms, self._config.name
            if name not in gemms._kernels:
                gemms._kernels[name] = HopperKernel(gemms._folder / name, self._config.spec(), include=gemms._include)
            gemms._kernels[name].launch(*args, **kwargs, order=gemms.order, timeout_s=gemms.timeout_s)

    def _choose(self, kind, a_major, b_major, d_dtype, m, n, k, num_sms, epilogue="store", gather="none") -> GemmConfig:
        return GemmConfig(kind, a_major, b_major, d_dtype, TILES[self.tile], epilogue, gather)

    @contextlib.contextmanager
    def installed(self) -> Iterator[SimtGemms]:
        """While it runs, gemm_launch launches CPU tensors on the machine. Calls give num_sms, and stream = 0."""
        with pytest.MonkeyPatch.context() as patch, tensor_maps():
            patch.setattr(gemm_launch, "_kernel", self.kernel)
            patch.setattr(gemm_launch, "choose_config", self._choose)
            patch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU device
            yield self


def group_bounds(rows: list[int]) -> tuple[list[tuple[int, int]], torch.Tensor, int]:
    """[(first, end)] of groups with so many rows, `group_ends`, and how many rows the pool has."""
    bounds, begin = [], 0
    for count in rows:
        bounds.append((begin, begin + count))
        begin += -(-count // GROUP_ALIGNMENT) * GROUP_ALIGNMENT
    return bounds, torch.tensor([end for _, end in bounds], dtype=torch.int32), begin


def pool(bounds: list[tuple[int, int]], size: int, width: int, fill: float = float("nan"), scale: float = 1.0) -> torch.Tensor:
    """Random BF16 rows for the groups, `fill` elsewhere."""
    t = torch.full((size, width), fill, dtype=torch.bfloat16)
    for first, end in bounds:
        t[first:end] = torch.randn(end - first, width) * scale
    return t
