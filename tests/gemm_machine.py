"""Two GPUs that are none: CPU memory that says it is on cuda:0 or cuda:1, and kernels that note their launches instead of running."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from deep_gemm import _C, gemm, gemm_launch
from deep_gemm.gemm_config import GemmConfig

BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
NUM_SMS = (132, 66)  # by device
REMEMBERED = (
    "bf16_gemm_nt",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "k_grouped_bf16_gemm_tn_contiguous",
)


class OnGpu0(torch.Tensor):
    device = property(lambda self: torch.device("cuda", 0))


class OnGpu1(torch.Tensor):
    device = property(lambda self: torch.device("cuda", 1))


def zeros(*shape: int, dtype: torch.dtype = BF16, gpu: int = 0) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype).as_subclass((OnGpu0, OnGpu1)[gpu])


def ints(*values: int, gpu: int = 0) -> torch.Tensor:
    return torch.tensor(values, dtype=I32).as_subclass((OnGpu0, OnGpu1)[gpu])


def strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype = BF16) -> torch.Tensor:
    """Without memory, so of any size."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta").as_subclass(OnGpu0)


_FORMATS = {"pointer": "<Q", "i32": "<i", "i64": "<q", "u32": "<I", "u64": "<Q", "f32": "<f"}


@dataclass(frozen=True)
class Launch:
    """What reached the kernel. current: the device that was current then."""

    config: GemmConfig
    device: int
    params: bytes
    num_ctas: int
    smem_bytes: int
    stream: int
    cluster: int
    current: int

    def __getitem__(self, field: str) -> object:
        """A field of the params; tensor maps as bytes."""
        name = "GemmParams" if self.config.epilogue == "store" else "GemmGatedParams"
        kind, offset, size = next(rest for name, *rest in _C.struct_fields(name) if name == field)
        raw = self.params[offset : offset + size]
        return raw if kind == "tensor_map" else struct.unpack(_FORMATS[kind], raw)[0]


class Machine:
    def __init__(self) -> None:
        self.current = 0
        self.launches: list[Launch] = []
        self.maps: dict[bytes, tuple] = {}  # arguments of every tensor map
        self.num_maps = 0

    def replace(self, monkeypatch) -> None:
        """Takes the place of torch.cuda, of the driver and of the kernels; the public calls have forgotten all plans."""
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.stream_of(device)))
        monkeypatch.setattr(torch.cuda, "device", self.made_current)
        monkeypatch.setattr(_C, "tensor_map", self.tensor_map)
        monkeypatch.setattr(gemm_launch, "_kernel", self.kernel)
        monkeypatch.setattr(gemm_launch, "_device_sms", NUM_SMS.__getitem__)
        monkeypatch.setattr(gemm_launch, "_num_sms", None)
        for name in REMEMBERED:
            monkeypatch.setattr(gemm, name, gemm_launch.remembered(getattr(gemm, name).__wrapped__))

    @staticmethod
    def stream_of(device: int) -> int:
        return 1000 + device

    @contextlib.contextmanager
    def made_current(self, device: int) -> Iterator[None]:
        before, self.current = self.current, device
        try:
            yield
        finally:
            self.current = before

    def tensor_map(self, *arguments) -> bytes:
        self.num_maps += 1
        made = hashlib.sha512(repr(arguments).encode()).digest() * 2
        self.maps[made] = arguments
        return made

    def kernel(self, config: GemmConfig, device: int) -> SimpleNamespace:
        def launch(params: bytes, grid: int, smem_bytes: int, stream: int, cluster: int) -> None:
            self.launches.append(Launch(config, device, params, grid, smem_bytes, stream, cluster, self.current))

        return SimpleNamespace(launch=launch)

    def only(self) -> Launch:
        (launch,) = self.launches
        return launch
