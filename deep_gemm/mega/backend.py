"""What a backend promises, the values it is given, and how one is chosen.

A backend is an object per buffer: `ReferenceBackend(buffer)` (any device, any torch.distributed backend) and `StagedBackend(buffer)` (CUDA
kernels). Everything it sees has been checked by `mega/checks.py`; it never raises for an argument.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from deep_gemm.activation import SwiGLU
from deep_gemm.errors import BackendUnavailable
from deep_gemm.jit import driver

if TYPE_CHECKING:
    from deep_gemm.mega.buffer import MegaMoeBuffer

GRADIENTS = ("x", "topk_weights", "w13", "w2", "b13", "b2")
"""Names of the inputs that have a gradient, in the order in which gradients are always listed."""

PRECISIONS = {"reference": ("bf16", "fp8", "mxfp8", "fp8_bwd"), "cuda": ("bf16",), "fused": ("bf16",)}
"""Precisions each backend computes; another one is refused before any work."""

CUDA_BACKENDS = ("cuda", "fused")
"""Backends of CUDA kernels: they share a buffer's symmetric memory and scratch."""


@dataclass(frozen=True)
class Problem:
    """One call, checked and resolved; made only by `mega/checks.py`.

    x             [T, H]; BF16 on CUDA, BF16, FP32 or FP64 on the reference; row-major
    topk_idx      [T, K] int32 or int64, -1 = no expert
    topk_weights  [T, K] FP32 (FP64 when x is FP64)
    w13           ([E_l, 2I, H],) gate rows then up rows, or ([E_l, I, H], [E_l, I, H]) = (gate, up); dtype of x
    w2            [E_l, H, I]; dtype of x
    b13, b2       expert biases in the split of w13 ([E_l, 2I] or 2 x [E_l, I]) and [E_l, H], dtype of x; both None or both given
    """

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    w13: tuple[Tensor, ...]
    w2: Tensor
    b13: tuple[Tensor, ...] | None
    b2: Tensor | None
    activation: SwiGLU
    precision: str
    save: str
    buffer: MegaMoeBuffer


@dataclass(frozen=True)
class WeightGrads:
    """Where weight gradients go: the tensors to write (or add into, when `accumulate`), or None = allocate in `dtype`.

    dw13 and db13 are split as Problem.w13. A given tensor may be BF16 or FP32, whatever `dtype` says.
    """

    dw13: tuple[Tensor, ...] | None = None
    dw2: Tensor | None = None
    db13: tuple[Tensor, ...] | None = None
    db2: Tensor | None = None
    accumulate: bool = False
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Gradients:
    """What `backward` returns; None where the gradient was not in `needs`. dx has the dtype of x, dtopk_weights that of Problem.topk_weights."""

    dx: Tensor | None = None
    dtopk_weights: Tensor | None = None
    dw13: tuple[Tensor, ...] | None = None
    dw2: Tensor | None = None
    db13: tuple[Tensor, ...] | None = None
    db2: Tensor | None = None


class Backend(Protocol):
    """Constructed as `Backend(buffer)`, once per buffer. No method synchronises with the device. Called with the buffer's device current."""

    name: str  # a key of PRECISIONS
    nbytes: int  # scratch that it holds now, without the buffer's symmetric memory

    def gemm1(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """(a, z): activated pool rows, and pre-activations if problem.save == "preact", else an empty tensor. Ends with `buffer.mark_published(a)`."""

    def gemm2(self, problem: Problem, a: Tensor) -> Tensor:
        """y [T, H], in the dtype of x. If not `buffer.is_published(a)`, another call has overwritten the exchanged routing: publish again first."""

    def backward(self, problem: Problem, dy: Tensor, z: Tensor, needs: frozenset[str], grads: WeightGrads) -> Gradients:
        """Gradients named in `needs` (a subset of `GRADIENTS`; never "b13"/"b2" without biases). Ends with `buffer.mark_published(None)`."""

    def fake_shapes(self, problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of a and z, from shapes and settings only. problem may hold fake tensors. Both have the dtype of x."""

    def check(self) -> None:
        """Raise, once, a fault that the device recorded (an id out of range, a late peer); reads host memory only."""


def on_device(device: torch.device) -> AbstractContextManager:
    """Makes `device` current for launches, as torch's own operators do; free where it already is."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def cuda_missing(device: torch.device) -> str | None:
    """Why the CUDA backend cannot run on `device`, in one sentence, or None if it can."""
    if device.type != "cuda":
        return f"the tensors are on {device}: the cuda backend needs CUDA tensors"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch, or use CPU tensors (backend 'reference')"
    if not torch.cuda.is_available():
        version = driver.cuda_version()
        if version and version[0] < int(torch.version.cuda.split(".")[0]):
            return (
                f"the NVIDIA driver is too old: it supports CUDA {version[0]}.{version[1]}, torch {torch.__version__} needs {torch.version.cuda}: "
                "update the driver"
            )
        return "no usable NVIDIA GPU or driver was found (torch.cuda.is_available() is False): use CPU tensors (backend 'reference')"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        what = "sm_100 kernels do not exist yet" if major == 10 else "kernels exist for sm_90 (H100, H200) only"
        return f"{device} ({torch.cuda.get_device_name(device)}) has compute capability {major}.{minor}: {what}"
    return None


def backend_class(name: str, device: torch.device) -> type:
    """The class of backend `name` for tensors on `device`; raises BackendUnavailable (one sentence) if it cannot run here."""
    if name in CUDA_BACKENDS:
        reason = cuda_missing(device)
        if reason is not None:
            raise BackendUnavailable(f"backend {name!r} is unavailable: {reason}")
        from deep_gemm.mega.fused.backend import FusedBackend
        from deep_gemm.mega.staged.backend import StagedBackend

        return StagedBackend if name == "cuda" else FusedBackend
    from deep_gemm.reference.backend import ReferenceBackend

    return ReferenceBackend
