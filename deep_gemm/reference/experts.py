"""The experts of one rank on the rows that were dispatched to them: forward, and the closed-form backward of `mega_moe_math`.

Rows come in expert order, `counts[e]` of them for local expert e. Everything is computed in the dtype of the rows given (FP32 or FP64);
weights of any floating dtype are converted, one expert at a time. `precision` says which operands are quantised (`precision.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..activation import SwiGLU
from .precision import Precision
from .swiglu import dswiglu, swiglu


@dataclass(frozen=True)
class Experts:
    """gate, up [E_l, I, H], down [E_l, H, I]; biases gate_bias, up_bias [E_l, I], down_bias [E_l, H], or all three or two None."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @classmethod
    def of(
        cls, w13: tuple[torch.Tensor, ...], w2: torch.Tensor, b13: tuple[torch.Tensor, ...] | None = None, b2: torch.Tensor | None = None
    ) -> Experts:
        """From the callers' layout: w13 one [E_l, 2I, H] (gate rows, then up rows) or two [E_l, I, H]; b13 split in the same way."""
        gate, up = halves(w13)
        gate_bias, up_bias = (None, None) if b13 is None else halves(b13)
        return cls(gate, up, w2, gate_bias, up_bias, b2)


def halves(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of a pair, or of one tensor that holds gate, then up, in dimension 1 (views)."""
    if len(parts) == 2:
        return parts[0], parts[1]
    if len(parts) == 1:
        gate, up = parts[0].chunk(2, 1)
        return gate, up
    raise ValueError(f"w13: expected one tensor or a (gate, up) pair, got {len(parts)} tensors")


# Every operand of a matmul is an allocation of its own, because BLAS may sum in another order for another alignment, and where an expert's
# rows and weights lie in the tensors of a rank depends on the number of ranks.
def _segments(rows: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    return [segment.clone() for segment in rows.split(counts)]


def _weight(weights: torch.Tensor, e: int, dtype: torch.dtype) -> torch.Tensor:
    return weights[e].to(dtype, copy=True)


def _bias(rows: torch.Tensor, bias: torch.Tensor | None, e: int) -> torch.Tensor:
    return rows if bias is None else rows + bias[e].to(rows.dtype)


def gemm1(
    x: torch.Tensor, counts: list[int], experts: Experts, act: SwiGLU, precision: Precision
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(a, gate, up), each [M, I]: pre-activations `x . W13[e]^T + b13[e]` of x [M, H], and a = swiglu(gate, up)."""
    q = precision.forward
    parts = []
    for e, rows in enumerate(_segments(x, counts)):
        operand = q.rows(rows)
        gate = _bias(operand @ q.weight(_weight(experts.gate, e, x.dtype)).T, experts.gate_bias, e)
        up = _bias(operand @ q.weight(_weight(experts.up, e, x.dtype)).T, experts.up_bias, e)
        # Per expert, not for all rows at once: vector and scalar code round sigmoid differently, and which one an element meets depends on
        # its place in the tensor. An expert's segment is the same for any number of ranks.
        parts.append((swiglu(gate, up, act), gate, up))
    a, gate, up = (torch.cat(part) for part in zip(*parts))
    return a, gate, up


def gemm2(a: torch.Tensor, counts: list[int], experts: Experts, precision: Precision) -> torch.Tensor:
    """Unweighted expert outputs `a . W2[e]^T + b2[e]` of a [M, I]: [M, H]."""
    q = precision.forward
    rows = [q.rows(part) @ q.weight(_weight(experts.down, e, a.dtype)).T for e, part in enumerate(_segments(a, counts))]
    return torch.cat([_bias(part, experts.down_bias, e) for e, part in enumerate(rows)])


@dataclass
class RowGradients:
    """What `backward` makes; fields that were not asked for are None. dx [M, H] unweighted rows, dp [M]; the rest as in `Experts`."""

    dx: torch.Tensor | None = None
    dp: torch.Tensor | None = None
    dgate: torch.Tensor | None = None
    dup: torch.Tensor | None = None
    ddown: torch.Tensor | None = None
    dgate_bias: torch.Tensor | None = None
    dup_bias: torch.Tensor | None = None
    ddown_bias: torch.Tensor | None = None


def _backward_one(
    rows: tuple[torch.Tensor, ...], experts: Experts, e: int, act: SwiGLU, precision: Precision, needs: frozenset[str]
) -> dict[str, torch.Tensor]:
    """The gradients of one expert; `rows` = (x, dy, p [M_e, 1], gate, up) of its segment."""
    x, dy, p, gate, up = rows
    out = {}
    if "b2" in needs:
        out["ddown_bias"] = (p * dy).sum(0)
    if needs <= {"b2"}:
        return out
    a = swiglu(gate, up, act)
    q = precision.wgrad
    if "w2" in needs:
        out["ddown"] = q.tokens(dy).T @ q.tokens(p * a)
    if needs <= {"w2", "b2"}:
        return out
    q = precision.dgrad
    # Not weighted by p: the router's gradient needs the inner product before the weighting.
    da = q.rows(dy) @ q.weight(_weight(experts.down, e, x.dtype).T).T
    if "topk_weights" in needs:
        dp = (da * a).sum(1)
        out["dp"] = dp if experts.down_bias is None else dp + (dy * experts.down_bias[e].to(x.dtype)).sum(1)
    dgate, dup = dswiglu(gate, up, p * da, act)
    if "x" in needs:
        out["dx"] = (
            q.rows(dgate) @ q.weight(_weight(experts.gate, e, x.dtype).T).T + q.rows(dup) @ q.weight(_weight(experts.up, e, x.dtype).T).T
        )
    if "w13" in needs:
        q = precision.wgrad
        x_tokens = q.tokens(x)
        out["dgate"], out["dup"] = q.tokens(dgate).T @ x_tokens, q.tokens(dup).T @ x_tokens
    if "b13" in needs:
        out["dgate_bias"], out["dup_bias"] = dgate.sum(0), dup.sum(0)
    return out


def backward(
    x: torch.Tensor,
    dy: torch.Tensor,
    p: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    counts: list[int],
    experts: Experts,
    *,
    act: SwiGLU,
    precision: Precision,
    needs: frozenset[str],
) -> RowGradients:
    """All gradients of rows x [M, H] with routing weights p [M], given dy [M, H] of their tokens and the pre-activations (gate, up).

        dA' = dy . W2[e]                     dp = <dA', a> + <dy, b2[e]>
        dZ  = swiglu'(z) applied to p * dA'  dx = dZ . W13[e]
        dW2[e] = sum_rows dy^T . (p * a)     dW13[e] = sum_rows dZ^T . x     db2[e] = sum_rows p * dy     db13[e] = sum_rows dZ

    needs: subset of {"x", "topk_weights", "w13", "w2", "b13", "b2"}; what it lacks is not computed. An expert without rows gets zeros.
    """
    segments = zip(*(_segments(rows, counts) for rows in (x, dy, p[:, None], *gate_up)))
    parts = [_backward_one(rows, experts, e, act, precision, needs) for e, rows in enumerate(segments)]
    join = {"dx": torch.cat, "dp": torch.cat}
    return RowGradients(**{name: join.get(name, torch.stack)([part[name] for part in parts]) for name in parts[0]})
