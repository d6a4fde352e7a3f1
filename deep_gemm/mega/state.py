"""What `mega_moe_fwd` hands to `mega_moe_bwd`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deep_gemm.mega.backend import Problem


class MegaMoeState:
    """Plain: it owns what backward needs and may be used once, several times, or dropped. It refers to the caller's tensors and copies none.

    nbytes   bytes it keeps alive beyond the caller's own tensors: 0 with save="recompute" and FP32 topk_weights
    """

    def __init__(self, problem: Problem, backend_name: str, z: Tensor, topk_weights: Tensor):
        self.problem = problem
        self.backend_name = backend_name
        self.topk_weights_dtype = topk_weights.dtype
        self._z: Tensor | None = z
        self._converted = problem.topk_weights is not topk_weights
        self._versions = [(name, tensor, tensor._version) for name, tensor in _inputs(problem) if not tensor.is_inference()]

    @property
    def nbytes(self) -> int:
        return (0 if self._z is None else self._z.nbytes) + (self.problem.topk_weights.nbytes if self._converted else 0)

    def preactivations(self) -> Tensor:
        """z, after a check that backward still sees what forward saw."""
        if self._z is None:
            raise RuntimeError("state: it was freed (state.free() or mega_moe_bwd(..., retain=False)); run mega_moe_fwd again")
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"{name} was modified in place between mega_moe_fwd and mega_moe_bwd (version {tensor._version}, expected {version}): "
                    "backward reads it again; keep it unchanged or pass forward a copy"
                )
        return self._z

    def free(self) -> None:
        """Let go of what it owns; a later backward raises."""
        self._z = None


def _inputs(problem: Problem) -> list[tuple[str, Tensor]]:
    named = [("x", problem.x), ("topk_idx", problem.topk_idx), ("topk_weights", problem.topk_weights), ("w2", problem.w2)]
    named += [("w13", part) for part in problem.w13] + [("b13", part) for part in problem.b13 or ()]
    return named if problem.b2 is None else [*named, ("b2", problem.b2)]


class _FourGradients(NamedTuple):
    dx: Tensor | None
    dtopk_weights: Tensor | None
    dw13: Tensor | tuple[Tensor, Tensor] | None
    dw2: Tensor | None


class MegaMoeGradients(_FourGradients):
    """`dx, dtopk_weights, dw13, dw2 = gradients`, whether or not there are biases; the biases' are the attributes `db13` and `db2`.

    None where a gradient was not in `needs`. dw13 and db13 are a tensor or a pair, as w13 was.
    """

    db13: Tensor | tuple[Tensor, Tensor] | None
    db2: Tensor | None

    def __new__(cls, dx, dtopk_weights, dw13, dw2, db13=None, db2=None):
        gradients = super().__new__(cls, dx, dtopk_weights, dw13, dw2)
        gradients.db13, gradients.db2 = db13, db2
        return gradients


def joined(parts: tuple[Tensor, ...] | None) -> Tensor | tuple[Tensor, ...] | None:
    """The opposite of `checks.split`."""
    return parts[0] if parts is not None and len(parts) == 1 else parts


def cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
