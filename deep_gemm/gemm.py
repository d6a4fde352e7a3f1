"""BF16 GEMMs on Hopper under DeepGEMM's names: dense, m-grouped (one weight per expert), k-grouped (one weight gradient per expert).

All compute D = A @ B^T for A [m, k] and B [n, k]. The two letters of a name say how A and B come: first letter `n` = A is [m, k], `t` = A is
[k, m]; second letter `t` = B is [n, k], `n` = B is [k, n]. Operands are BF16, the sum is FP32, D is BF16 or FP32 with unit stride in its
last dimension. With `c` the result is C + A @ B^T, added in FP32 before the rounding to D; `c` may be `d` itself.
Operands: unit stride in one of their last two dimensions, every other stride and the address a multiple of 16 bytes (TMA).
Group extents are read on the GPU: no call copies anything to the host or waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .errors import BackendUnavailable
from .gemm_config import shipped_specs
from .gemm_launch import (
    GROUP_ALIGNMENT,
    Gather,
    GemmPlan,
    get_num_sms,
    launch,
    launch_k_grouped,
    launch_m_grouped,
    major_of,
    only_launches,
    record,
    remembered,
    set_num_sms,
)

__all__ = [
    "bf16_gemm_nn", "bf16_gemm_nt", "bf16_gemm_tn", "bf16_gemm_tt", "get_mk_alignment_for_contiguous_layout", "get_num_sms",
    "k_grouped_bf16_gemm_tn_contiguous", "launch_k_grouped", "launch_m_grouped", "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous", "m_grouped_bf16_gemm_nt_masked", "plan_gemm", "set_num_sms", "shipped_specs",
]  # fmt: skip


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows at which every group of a contiguous layout must start."""
    return GROUP_ALIGNMENT


def plan_gemm(call: Callable[..., None], *args, **kwargs) -> GemmPlan:
    """The launch of `call(*args, **kwargs)`, a GEMM of this module, checked and ready: plan() starts it again and again in 2 to 3 us of host time.

    The plan keeps the addresses and sizes of these tensors (and the tensors); what they hold, group layouts too, may change between calls.
    ValueError for a call that does more than one launch: a `c` that is another tensor than `d`, group sizes instead of ends, an empty result.
    """
    return record(lambda: call(*args, **kwargs))


# ---- dense -------------------------------------------------------------------------------------------------------------------------


@remembered
def bf16_gemm_nt(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, c: torch.Tensor | None = None, compiled_dims: str = "nk") -> None:
    """d [m, n] = (c +) a [m, k] @ b [n, k]^T. `compiled_dims` is accepted for compatibility: every dimension is read at run time.

    Raises ValueError / TypeError that name the argument, what came and what was expected; BackendUnavailable without a Hopper GPU.
    m = 0 or n = 0: nothing happens. k = 0: d = c, or zeros.
    """
    _operand("a", a, 2)
    _operand("b", b, 2)
    m, k = a.shape
    n = b.shape[0]
    _equal("b.shape[k]", b.shape[1], "a's k", k)
    _equal("b.device", b.device, "a's device", a.device)
    _result("d", d, (m, n), a.device)
    if _nothing_to_sum(d, c, k):
        return
    launch("dense", a, b, d, m=m, accumulate=_begin_with(d, c))


def bf16_gemm_nn(a, b, d, c=None, compiled_dims: str = "nk") -> None:
    """d [m, n] = (c +) a [m, k] @ b [k, n]; as bf16_gemm_nt."""
    bf16_gemm_nt(a, _transposed("b", b), d, c)


def bf16_gemm_tn(a, b, d, c=None, compiled_dims: str = "mn") -> None:
    """d [m, n] = (c +) a [k, m]^T @ b [k, n]; as bf16_gemm_nt."""
    bf16_gemm_nt(_transposed("a", a), _transposed("b", b), d, c)


def bf16_gemm_tt(a, b, d, c=None, compiled_dims: str = "mn") -> None:
    """d [m, n] = (c +) a [k, m]^T @ b [n, k]^T; as bf16_gemm_nt."""
    bf16_gemm_nt(_transposed("a", a), b, d, c)


# ---- m-grouped ---------------------------------------------------------------------------------------------------------------------


@remembered
def m_grouped_bf16_gemm_nt_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    grouped_layout: torch.Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
    *,
    a_rows: torch.Tensor | None = None,
) -> None:
    """d [m, n] = a [m, k] @ b[group of the row] [n, k]^T, with b [G, n, k].

    grouped_layout  int32, contiguous. Default: [m], the group of each row, -1 = padding; a group starts at a multiple of
                    get_mk_alignment_for_contiguous_layout() rows. use_psum_layout: [G], the exclusive end row of each group; group g
                    starts at the end of g - 1 rounded up to that alignment.
    a_rows          int32 [m], contiguous: row i of A is a[a_rows[i]], or zeros for -1; a is then [any, k] with unit stride in k. Padding rows
                    too name a row of a, or -1.
    Rows without a group are not read into a result and their rows of d are not written.
    """
    _operand("a", a, 2)
    _operand("b", b, 3)
    (m, k), (groups, n, b_k) = a.shape, b.shape
    if a_rows is not None:
        m = d.shape[0]
        _gathered("a", a, a_rows, m)
    _equal("b.shape[k]", b_k, "a's k", k)
    _equal("b.device", b.device, "a's device", a.device)
    _result("d", d, (m, n), a.device)
    _layout("grouped_layout", grouped_layout, groups if use_psum_layout else m, a.device)
    if _nothing_to_sum(d, None, k):
        return
    kind = "m_ends" if use_psum_layout else "m_index"
    gather = None if a_rows is None else Gather("a", a, a_rows)
    launch(kind, None if gather else a, b, d, m=m, layout=grouped_layout, num_groups=groups, window=(0, m), gather=gather)


def m_grouped_bf16_gemm_nn_contiguous(
    a, b, d, grouped_layout, compiled_dims: str = "nk", use_psum_layout: bool = False, *, a_rows: torch.Tensor | None = None
) -> None:
    """d [m, n] = a [m, k] @ b[group of the row] [k, n], with b [G, k, n]; as m_grouped_bf16_gemm_nt_contiguous."""
    m_grouped_bf16_gemm_nt_contiguous(a, _transposed("b", b, 3), d, grouped_layout, use_psum_layout=use_psum_layout, a_rows=a_rows)


@remembered
def m_grouped_bf16_gemm_nt_masked(
    a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int, compiled_dims: str = "nk"
) -> None:
    """d[g, :masked_m[g]] = a[g, :masked_m[g]] @ b[g]^T; a [G, max_m, k], b [G, n, k], d [G, max_m, n], masked_m [G] int32.

    Rows past masked_m[g] are not read into a result and not written. `expected_m` (> 0) is a hint.
    """
    _operand("a", a, 3)
    _operand("b", b, 3)
    groups, max_m, k = a.shape
    _equal("b.shape[0]", b.shape[0], "a's number of groups", groups)
    _equal("b.shape[k]", b.shape[2], "a's k", k)
    _equal("b.device", b.device, "a's device", a.device)
    _result("d", d, (groups, max_m, b.shape[1]), a.device)
    _layout("masked_m", masked_m, groups, a.device)
    if not isinstance(expected_m, int) or expected_m <= 0:
        raise ValueError(f"expected_m = {expected_m!r}: expected a positive int")
    if _nothing_to_sum(d, None, k):
        return
    launch("m_masked", a, b, d, m=max_m, layout=masked_m, num_groups=groups, window=(0, max_m))


# ---- k-grouped ---------------------------------------------------------------------------------------------------------------------


@remembered
def k_grouped_bf16_gemm_tn_contiguous(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    ks_cpu: list[int] | None,
    grouped_layout: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
    *,
    a_rows: torch.Tensor | None = None,
    b_rows: torch.Tensor | None = None,
) -> None:
    """d[g] [m, n] = (c[g] +) a[rows of g]^T @ b[rows of g]; a [sum_k, m], b [sum_k, n], d [G, m, n].

    grouped_layout  [G] int32: rows of each group, one group after another; with use_psum_layout the exclusive end row of each group,
                    which starts at the end of the one before rounded up to get_mk_alignment_for_contiguous_layout().
    a_rows, b_rows  int32 [sum_k], one of them at most: row i of the operand is a[a_rows[i]], or zeros for -1.
    ks_cpu          accepted for compatibility and not needed: the sizes are read on the GPU. Any size >= 0 works; a group without
                    rows gives zeros, or c[g].
    """
    _operand("a", a, 2)
    _operand("b", b, 2)
    m, n = a.shape[1], b.shape[1]
    rows = (a if a_rows is None else b).shape[0]
    if a_rows is not None and b_rows is not None:
        raise ValueError("a_rows and b_rows are both given: expected one of them at most")
    _equal("b.device", b.device, "a's device", a.device)
    for name, t, listed in (("a", a, a_rows), ("b", b, b_rows)):
        if (t.shape[1] > 1 and t.stride(1) != 1) or (t.shape[0] > 1 and t.stride(0) % 8):
            raise ValueError(f"{name}.stride() = {tuple(t.stride())}: expected unit stride in the last dimension, and a multiple of 8 in the first")
        if listed is None:
            _equal(f"{name}.shape[0]", t.shape[0], "the other operand's rows", rows)
        else:
            _gathered(name, t, listed, rows)
    groups = d.shape[0] if d.dim() == 3 else 0
    _result("d", d, (groups, m, n), a.device)
    _layout("grouped_layout", grouped_layout, groups, a.device)
    if ks_cpu is not None and len(ks_cpu) != groups:
        raise ValueError(f"ks_cpu has {len(ks_cpu)} entries, but d has {groups} groups")
    if _nothing_to_sum(d, c, rows):
        return
    if not use_psum_layout:
        only_launches("group sizes are summed up first; give ends (use_psum_layout=True)")
    ends = grouped_layout if use_psum_layout else grouped_layout.cumsum(0, dtype=torch.int32)
    alignment = GROUP_ALIGNMENT if use_psum_layout else 1
    accumulate = _begin_with(d, c)
    gather = Gather("a", a, a_rows) if a_rows is not None else None if b_rows is None else Gather("b", b, b_rows)
    launch("k_ends", None if a_rows is not None else a.t(), None if b_rows is not None else b.t(), d, m=m, layout=ends, num_groups=groups,
           window=(0, rows), alignment=alignment, accumulate=accumulate, gather=gather)  # fmt: skip


# ---- checks ------------------------------------------------------------------------------------------------------------------------


def _operand(name: str, t: torch.Tensor, dim: int) -> None:
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name} is a {type(t).__name__}: expected a tensor")
    if t.dim() != dim:
        raise ValueError(f"{name}.shape = {tuple(t.shape)}: expected {dim} dimensions")
    if t.dtype != torch.bfloat16:
        raise TypeError(f"{name}.dtype = {t.dtype}: expected torch.bfloat16")
    _cuda(name, t)
    if t.numel() and major_of(t) is None:
        raise ValueError(
            f"{name}: shape {tuple(t.shape)}, strides {tuple(t.stride())}, address {t.data_ptr():#x}: expected unit stride in one of the last two "
            "dimensions, all other strides multiples of 8 elements and a 16-byte aligned address; pad the inner dimension or copy"
        )


_GATHER_BYTES = 16 << 32  # rows begin at 32-bit numbers of 16 bytes


def _gathered(name: str, t: torch.Tensor, rows: torch.Tensor, length: int) -> None:
    _layout(f"{name}_rows", rows, length, t.device)
    if max(t.shape[0] - 1, 0) * t.stride(0) * t.element_size() >= _GATHER_BYTES:
        raise ValueError(f"{name}: shape {tuple(t.shape)}, strides {tuple(t.stride())}: expected the last row to begin within 64 GiB, as rows are gathered")
    if t.shape[1] % 8 or (t.shape[1] > 1 and t.stride(1) != 1):
        raise ValueError(
            f"{name}: shape {tuple(t.shape)}, strides {tuple(t.stride())}: expected rows of unit stride and a multiple of 8 elements, as they are gathered"
        )


def _cuda(name: str, t: torch.Tensor) -> None:
    if t.device.type != "cuda":
        raise BackendUnavailable(f"{name}.device = {t.device}: the GEMM kernels need CUDA tensors on a Hopper GPU (compute capability 9.0)")


def _transposed(name: str, t: torch.Tensor, dim: int = 2) -> torch.Tensor:
    if not isinstance(t, torch.Tensor) or t.dim() != dim:
        raise ValueError(f"{name}: expected a tensor of {dim} dimensions, got {getattr(t, 'shape', type(t).__name__)}")
    return t.transpose(-1, -2)


def _equal(name: str, got: int, what: str, expected: int) -> None:
    if got != expected:
        raise ValueError(f"{name} = {got}, but {what} = {expected}")


def _result(name: str, t: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}.shape = {tuple(t.shape)}: expected {shape}")
    if t.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"{name}.dtype = {t.dtype}: expected torch.bfloat16 or torch.float32")
    if t.device != device:
        raise ValueError(f"{name}.device = {t.device}: expected {device}")
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"{name}.stride() = {tuple(t.stride())}: expected unit stride in the last dimension")


def _layout(name: str, t: torch.Tensor, length: int, device: torch.device) -> None:
    if t.dtype != torch.int32:
        raise TypeError(f"{name}.dtype = {t.dtype}: expected torch.int32")
    if tuple(t.shape) != (length,) or not t.is_contiguous():
        raise ValueError(f"{name}: shape {tuple(t.shape)}, strides {tuple(t.stride())}: expected contiguous ({length},)")
    if t.device != device:
        raise ValueError(f"{name}.device = {t.device}: expected {device}")


def _nothing_to_sum(d: torch.Tensor, c: torch.Tensor | None, k: int) -> bool:
    """Handles the results that need no kernel: empty d, or an empty sum. True when the call is done."""
    if d.numel() and k:
        return False
    if d.numel() and not _begin_with(d, c):
        d.zero_()
    return True


def _begin_with(d: torch.Tensor, c: torch.Tensor | None) -> bool:
    """Puts c into d when they are different tensors; True when the kernel has something to add to."""
    if c is None:
        return False
    _equal("c.shape", tuple(c.shape), "d.shape", tuple(d.shape))
    if c.dtype != d.dtype or c.device != d.device:
        raise ValueError(f"c is {c.dtype} on {c.device}: expected {d.dtype} on {d.device}, as d")
    if c.data_ptr() != d.data_ptr() or c.stride() != d.stride():
        only_launches("c is copied into d first; give c = d")
        d.copy_(c)
    return True
