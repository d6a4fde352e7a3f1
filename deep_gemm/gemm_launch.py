"""Launch of the BF16 GEMM kernel. No argument checks here: `gemm.py` checks for users, `mega/staged` prepares its own.

Operands are given as logical [.., mn, k] views (A [m, k], B [n, k], with a leading group dimension where they have groups); how they are
stored is read from the strides.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from . import _C, jit
from .errors import BackendUnavailable
from .gemm_config import BLOCK_K, BLOCK_M, D_TYPES, GemmConfig, choose_config

GROUP_ALIGNMENT = 128  # rows at which an m-group starts: block_m, so that no tile holds rows of two groups
SWIZZLE_ELEMENTS = 64  # BF16 in one 128-byte swizzle row
DP_COLUMNS = 192  # of dA' whose products with a one partial sum of dp covers: block_n of every dSwiGLU tile
GATED_COLUMNS = 32  # of a box of z that dSwiGLU loads (epilogue/gated.cuh)
NO_WINDOW = (0, 2**31 - 1)


# ---- operands ----------------------------------------------------------------------------------------------------------------------


def major_of(t: torch.Tensor) -> str | None:
    """How the logical [.., mn, k] view `t` lies in memory: "k", "mn", or None when TMA cannot read it.

    TMA needs a unit stride in one of the two and multiples of 16 bytes in all others; the stride of a dimension of size 1 is free.
    """
    if t.data_ptr() % 16 or any(size > 1 and stride % 8 for size, stride in zip(t.shape[:-2], t.stride()[:-2], strict=True)):
        return None
    (mn, k), (mn_stride, k_stride) = t.shape[-2:], t.stride()[-2:]
    if (k == 1 or k_stride == 1) and (mn == 1 or mn_stride % 8 == 0):
        return "k"
    if (mn == 1 or mn_stride == 1) and (k == 1 or k_stride % 8 == 0):
        return "mn"
    return None


def operand_map(t: torch.Tensor, major: str, box_mn: int) -> bytes:
    """Rank-3 map (inner, rows, groups) of a logical [.., mn, k] view, boxes as mma/sm90.cuh lays tiles out. box_mn: rows of a K-major box."""
    inner, rows = (t.shape[-1], t.shape[-2]) if major == "k" else (t.shape[-2], t.shape[-1])
    row_stride = t.stride(-2) if major == "k" else t.stride(-1)
    groups, group_stride = (t.shape[0], t.stride(0)) if t.dim() == 3 else (1, 8)
    free = -(-inner // 8) * 8  # stride of a dimension that is never stepped over
    strides = [2 * (s if n > 1 else free) for n, s in ((rows, row_stride), (groups, group_stride))]
    box = (SWIZZLE_ELEMENTS, box_mn if major == "k" else BLOCK_K, 1)
    return _C.tensor_map(t.data_ptr(), "bf16", (inner, rows, groups), strides, box, 128)


def result_map(d: torch.Tensor) -> bytes | None:
    """Rank-3 map (n, m, groups) of d [.., m, n] in boxes of 64 rows of 128 bytes, or None when TMA cannot write it."""
    size = d.element_size()
    if d.data_ptr() % 16 or any(n > 1 and s * size % 16 for n, s in zip(d.shape[:-1], d.stride()[:-1], strict=True)):
        return None
    groups, (m, n) = d.shape[0] if d.dim() == 3 else 1, d.shape[-2:]
    free = -(-n * size // 16) * 16
    strides = (d.stride(-2) * size if m > 1 else free, d.stride(0) * size if groups > 1 else free)
    return _C.tensor_map(d.data_ptr(), D_TYPES[d.dtype][0], (n, m, groups), strides, (128 // size, 64, 1), 128)


# ---- launch ------------------------------------------------------------------------------------------------------------------------

_num_sms: int | None = None


def set_num_sms(num_sms: int) -> None:
    """Number of SMs (CTAs) every persistent kernel uses from now on; 0 = all of the device. Process-wide."""
    global _num_sms
    if not isinstance(num_sms, int) or num_sms < 0:
        raise ValueError(f"num_sms = {num_sms!r}: expected 0 (all) or a positive number")
    _num_sms = num_sms or None


@functools.cache
def _device_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def get_num_sms(device: int | None = None) -> int:
    """Number of SMs that persistent kernels use on `device` (default: the current one). BackendUnavailable without a CUDA device."""
    try:
        total = _device_sms(torch.cuda.current_device() if device is None else device)
    except (AssertionError, RuntimeError) as error:  # torch: built without CUDA, no driver
        raise BackendUnavailable(f"get_num_sms: no CUDA device: torch says: {error}") from error
    return total if _num_sms is None else min(_num_sms, total)


@dataclass(frozen=True)
class GemmPlan:
    """One launch, ready: calling it starts the kernel on the current stream of its device, or on `stream`, with the addresses and sizes of the call
    that it was made from. `tensors` keeps their memory alive."""

    config: GemmConfig
    params: bytes
    num_ctas: int
    smem_bytes: int
    device: int
    tensors: tuple[torch.Tensor | None, ...]

    def __call__(self, stream: int | None = None) -> None:
        if torch.cuda.current_device() != self.device:  # the default stream's handle means the current device's
            with torch.cuda.device(self.device):
                return self(stream)
        stream = torch.cuda.current_stream(self.device).cuda_stream if stream is None else stream
        _kernel(self.config, self.device).launch(self.params, self.num_ctas, self.smem_bytes, stream, self.config.tile.cluster)


@functools.cache
def _kernel(config: GemmConfig, device: int):
    return jit.load(config.spec(), device)


_thread = threading.local()  # .recorded: while `record` runs, the launches of this thread go there instead


def _recorded() -> list[GemmPlan] | None:
    return getattr(_thread, "recorded", None)


class NotOneLaunch(ValueError):
    """A call that a plan cannot repeat."""


def record(call: Callable[[], None]) -> GemmPlan:
    """The launch that `call` would make. NotOneLaunch when it makes none, or several, or does other work."""
    if _recorded() is not None:
        raise RuntimeError("a plan is being made already")
    plans = _thread.recorded = []
    try:
        call()
    finally:
        _thread.recorded = None
    if len(plans) != 1:
        raise NotOneLaunch(f"this call makes {len(plans)} launches: expected one (an empty result needs no plan)")
    return plans[0]


def only_launches(what: str) -> None:
    """Called before work beside the launch, which a plan would not repeat."""
    if _recorded() is not None:
        raise NotOneLaunch(f"a plan repeats one kernel launch and nothing else: {what}")


_REMEMBERED_LAUNCHES = 4096


def remembered(call: Callable[..., None]) -> Callable[..., None]:
    """`call`, whose checks and tensor maps are made once for arguments that describe the same memory: a second call costs a look-up and the launch."""
    launches: dict[tuple, GemmPlan] = {}

    @functools.wraps(call)
    def wrapper(*args, **kwargs) -> None:
        if _recorded() is not None:
            return call(*args, **kwargs)
        try:
            key = (_num_sms, *map(memory_of, args), *kwargs, *map(memory_of, kwargs.values()))
            plan = launches.get(key)
        except (TypeError, RuntimeError):  # not hashable, or a tensor without memory: the call says what it expects
            return call(*args, **kwargs)
        if plan is None:
            try:
                plan = replace(record(lambda: call(*args, **kwargs)), tensors=())  # does not keep memory alive: the key says where it is
            except NotOneLaunch:
                return call(*args, **kwargs)
            if len(launches) >= _REMEMBERED_LAUNCHES:
                launches.clear()
            launches[key] = plan
        plan()

    return wrapper


def memory_of(value: object) -> object:
    """A key: equal for arguments that describe the same memory, and for equal values of one type."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype, value.device
    value = tuple(value) if isinstance(value, list) else value
    return type(value), value  # True, 1 and 1.0 are equal


def _start(config: GemmConfig, device: int, params: bytes, num_sms: int, stream: int | None, tensors: tuple[torch.Tensor | None, ...]) -> None:
    cluster = config.tile.cluster
    plan = GemmPlan(config, params, num_sms // cluster * cluster, config.smem_bytes, device, tensors)
    recorded = _recorded()
    if recorded is not None:
        recorded.append(plan)
    else:
        plan(stream)


@dataclass(frozen=True)
class Gather:
    """Rows of an operand ("a" or "b") that are listed: row i of the operand is row rows[i] of `source` [any, width], or zeros for -1.

    rows: int32. m-grouped: the rows of a, indexed like the rows of d. k-grouped: the contraction, indexed like the rows of the other operand.
    """

    operand: str
    source: torch.Tensor
    rows: torch.Tensor

    def fields(self) -> dict[str, int]:
        return {"gather_rows": self.rows.data_ptr(), "gather_source": self.source.data_ptr(), "gather_stride": self.source.stride(0)}


_NO_GATHER = {"gather_rows": 0, "gather_source": 0, "gather_stride": 0}


def launch(
    kind: str,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    d: torch.Tensor,
    *,
    m: int,
    layout: torch.Tensor | None = None,
    num_groups: int = 1,
    window: tuple[int, int] = NO_WINDOW,
    alignment: int = GROUP_ALIGNMENT,
    carry: tuple[torch.Tensor, torch.Tensor] | None = None,
    accumulate: bool = False,
    gather: Gather | None = None,
    num_sms: int | None = None,
    stream: int | None = None,
) -> None:
    """One GEMM launch: d [.., m, n] (unit stride on n) from the logical views a [.., m, k] and b [.., n, k]; None for the one that is gathered."""
    n, device = d.shape[-1], d.device.index
    k = gather.source.shape[1] if a is None and kind != "k_ends" else (b if a is None else a).shape[-1]
    a_major, b_major = ("mn", "mn") if kind == "k_ends" else ("k" if a is None else major_of(a), major_of(b))
    num_sms = num_sms or get_num_sms(device)
    config = choose_config(kind, a_major, b_major, d.dtype, m, n, k, num_sms, gather="none" if gather is None else gather.operand)
    d_map = result_map(d)
    params = _C.pack(
        "GemmParams",
        **_common_fields(config, a, b, gather, m=m, n=n, k=k, layout=layout, num_groups=num_groups, window=window, alignment=alignment),
        d_map=d_map or bytes(128),
        d_has_map=d_map is not None,
        d=d.data_ptr(),
        carry_in=0 if carry is None else carry[0].data_ptr(),
        carry_out=0 if carry is None else carry[1].data_ptr(),
        ldd=d.stride(-2),
        d_group_stride=d.stride(0) if d.dim() == 3 else 0,
        accumulate=accumulate,
    )
    _start(config, device, params, num_sms, stream, (a, b, d, layout, *(carry or ()), *((gather.source, gather.rows) if gather else ())))


def _common_fields(config: GemmConfig, a, b, gather: Gather | None, *, m, n, k, layout, num_groups, window, alignment) -> dict[str, object]:
    parts = 2 if config.epilogue == "swiglu" else config.tile.cluster  # boxes that make up a K-major tile of b
    return {
        "a": bytes(128) if a is None else operand_map(a, config.a_major, BLOCK_M // config.tile.cluster),
        "b": bytes(128) if b is None else operand_map(b, config.b_major, config.tile.block_n // parts),
        **(_NO_GATHER if gather is None else gather.fields()),
        "group_layout": 0 if layout is None else layout.data_ptr(),
        "m": m,
        "n": n,
        "k": k,
        "num_groups": num_groups,
        "window_begin": window[0],
        "window_end": window[1],
        "alignment": alignment,
    }


def launch_m_grouped(a, b, d, group_ends, *, b_major, rows=None, window=NO_WINDOW, accumulate=False, num_sms=None, stream=None) -> None:
    """d[rows of g] = a[rows of g] @ b[g]^T for the groups and the window of `group_ends` (docs/design.md, "GEMM").

    a [rows, k], d [rows, n] (a column slice is fine); b [G, n, k] for b_major "k" or [G, k, n] for "mn"; group_ends [G] int32.
    rows: int32, a row for each row of d: row i of a is then a[rows[i]], or zeros for -1; a [any, k] has unit stride in k.
    """
    weight = b if b_major == "k" else b.transpose(1, 2)
    gather = None if rows is None else Gather("a", a, rows)
    launch("m_ends", None if gather else a, weight, d, m=d.shape[0], layout=group_ends, num_groups=b.shape[0], window=window,
           accumulate=accumulate, gather=gather, num_sms=num_sms, stream=stream)  # fmt: skip


def launch_k_grouped(
    a, b, d, group_ends, *, gather: Gather | None = None, window=NO_WINDOW, carry=None, accumulate=False, num_sms=None, stream=None
) -> None:
    """d[g] (+)= a[rows of g]^T @ b[rows of g] over the window; a [rows, m], b [rows, n], d [G, m, n]. The gathered operand is None.

    carry [2, m, n] FP32, needed when d is BF16 and there are several windows, all of one size: a window reads the half that the window before it
    wrote and writes the other, because it may end one group's sum and begin another's.
    """
    if carry is not None:
        parity = window[0] // (window[1] - window[0]) % 2
        carry = (carry[1 - parity], carry[parity])
    launch("k_ends", None if a is None else a.t(), None if b is None else b.t(), d, m=d.shape[-2], layout=group_ends, num_groups=d.shape[0],
           window=window, carry=carry, accumulate=accumulate, gather=gather, num_sms=num_sms, stream=stream)  # fmt: skip


# ---- gated activation --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gate:
    """What the gated epilogues read beside the operands. Addresses are device addresses, 0 = none.

    alpha, up_offset, clamp  of deep_gemm.activation
    gate_bias, up_bias       BF16 [groups, I], expert stride `bias_stride` in elements
    row_weight               of row 0's FP32 weight, stride in bytes
    """

    alpha: float
    up_offset: float
    clamp: float
    gate_bias: int = 0
    up_bias: int = 0
    bias_stride: int = 0
    row_weight: int = 0
    row_weight_stride: int = 0


def launch_swiglu(x, w_gate, w_up, a, group_ends, gate: Gate, *, z=None, rows=None, window=NO_WINDOW, num_sms=None, stream=None) -> None:
    """a[rows of g] = act(z + bias) (times the row's weight), z = x[rows of g] @ [w_gate[g]; w_up[g]]^T, in one launch.

    x [C, H], w_gate and w_up [G, I, H] (K-major, any group stride), a [C, I], z [C, 2I] or None: not stored; BF16. Rows between a group's end and
    the next multiple of 128 stay as they are. rows: as in `launch_m_grouped`.
    """
    gather = None if rows is None else Gather("a", x, rows)
    device, num_sms = x.device.index, num_sms or get_num_sms(x.device.index)
    config = choose_config("m_ends", "k", "k", a.dtype, *a.shape, x.shape[1], num_sms, "swiglu", "a" if gather else "none")
    params = _C.pack(
        "GemmGatedParams",
        **_gated_fields(config, x, w_gate, a, group_ends, gate, gather, window),
        **gate_up_fields(z),
        b_up=operand_map(w_up, "k", config.tile.block_n // 2),
        z_gate_map=bytes(128),
        z_up_map=bytes(128),
        row_dp=0,
        row_dp_stride=0,
        save_z=z is not None,
    )
    _start(config, device, params, num_sms, stream, (x, w_gate, w_up, a, z, group_ends, rows))


def launch_dswiglu(dy, w2, z, dz, act, row_dp, group_ends, gate: Gate, *, rows=None, window=NO_WINDOW, num_sms=None, stream=None) -> None:
    """With dA' = dy[rows of g] @ w2[g]: dz = p act'(z + bias) dA', act = p a, row_dp[j, row] = partial sums of dA' a, in one launch.

    dy [C, H], w2 [G, H, I], z and dz [C, 2I] (may be the same), act [C, I]; BF16. row_dp FP32 [dp_parts(I), C]: their sum over the first dimension is
    dp. Padding rows as in `launch_swiglu`. rows: as in `launch_m_grouped`.
    """
    gather = None if rows is None else Gather("a", dy, rows)
    device, num_sms = dy.device.index, num_sms or get_num_sms(dy.device.index)
    config = choose_config("m_ends", "k", "mn", act.dtype, *act.shape, dy.shape[1], num_sms, "dswiglu", "a" if gather else "none")
    params = _C.pack(
        "GemmGatedParams",
        **_gated_fields(config, dy, w2.transpose(1, 2), act, group_ends, gate, gather, window),
        **gated_halves("z", z),
        **gate_up_fields(dz),
        b_up=bytes(128),
        row_dp=row_dp.data_ptr(),
        row_dp_stride=row_dp.stride(0),
        save_z=False,
    )
    _start(config, device, params, num_sms, stream, (dy, w2, z, dz, act, row_dp, group_ends, rows))


def dp_parts(width: int) -> int:
    """Partial sums of dp per row that `launch_dswiglu` writes for intermediate_hidden = width."""
    return -(-width // DP_COLUMNS)


def _gated_fields(config: GemmConfig, source, weight, d, group_ends, gate: Gate, gather: Gather | None, window) -> dict[str, object]:
    a = None if gather else source
    common = _common_fields(config, a, weight, gather, m=d.shape[0], n=d.shape[1], k=source.shape[1], layout=group_ends,
                            num_groups=weight.shape[0], window=window, alignment=GROUP_ALIGNMENT)  # fmt: skip
    unused = {"d_map": bytes(128), "carry_in": 0, "carry_out": 0, "d_group_stride": 0, "accumulate": False, "d_has_map": False}
    return common | unused | vars(gate) | {"d": d.data_ptr(), "ldd": d.stride(0)}


def gate_up_fields(z: torch.Tensor | None) -> dict[str, int]:
    """Where the gated epilogues write the halves of z [rows, 2I], or of its gradient; None: nowhere."""
    if z is None:
        return {"gate_out": 0, "up_out": 0, "gate_up_ld": 0}
    return {"gate_out": z.data_ptr(), "up_out": z.data_ptr() + z.shape[1] // 2 * z.element_size(), "gate_up_ld": z.stride(0)}


def gated_halves(name: str, z: torch.Tensor) -> dict[str, bytes]:
    width = z.shape[1] // 2
    return {f"{name}_gate_map": gated_map(z[:, :width]), f"{name}_up_map": gated_map(z[:, width:])}


def gated_map(t: torch.Tensor) -> bytes:
    """Rank-2 map (columns, rows) of t in boxes of 64 rows x 32 columns."""
    rows, columns = t.shape
    return _C.tensor_map(t.data_ptr(), "bf16", (columns, rows), (2 * t.stride(0),), (GATED_COLUMNS, 64), 64)
