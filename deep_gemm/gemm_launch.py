"""Configuration and launch of the BF16 GEMM kernel. No argument checks here: `gemm.py` checks for users, `mega/staged` prepares its own.

Operands are given as logical [.., mn, k] views (A [m, k], B [n, k], with a leading group dimension where they have groups); how they are
stored is read from the strides.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from . import _C, environment, jit
from .errors import BackendUnavailable
from .jit import CppType, KernelSpec

BLOCK_M, BLOCK_K = 128, 64
THREADS = 384  # two math warpgroups and the load warpgroup
SMEM_LIMIT = 232448  # bytes of shared memory that one CTA can have on sm_90
GROUP_ALIGNMENT = 128  # rows at which an m-group starts: block_m, so that no tile holds rows of two groups
SWIZZLE_ELEMENTS = 64  # BF16 in one 128-byte swizzle row
NO_WINDOW = (0, 2**31 - 1)
_D_TYPES = {torch.bfloat16: ("bf16", "__nv_bfloat16"), torch.float32: ("f32", "float")}


# ---- configuration -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmConfig:
    """One compiled variant; its name is its print, cache label and benchmark label."""

    kind: str  # key of _C.gemm_kinds()
    a_major: str  # "k" or "mn"
    b_major: str
    d_dtype: torch.dtype
    block_n: int
    num_stages: int
    max_groups: int  # size of the group table in shared memory

    @property
    def name(self) -> str:
        tile = f"m{BLOCK_M}n{self.block_n}k{BLOCK_K}_s{self.num_stages}_g{self.max_groups}"
        return f"sm90_bf16_gemm_{self.kind}_a{self.a_major}_b{self.b_major}_{_D_TYPES[self.d_dtype][0]}_{tile}"

    @property
    def smem_bytes(self) -> int:
        return _C.gemm_smem_bytes(BLOCK_M, self.block_n, BLOCK_K, self.num_stages, self.max_groups)

    def spec(self) -> KernelSpec:
        return KernelSpec(
            name=self.name,
            header="deep_gemm/kernels/sm90_bf16_gemm.cuh",
            entry="deep_gemm::kernels::sm90_bf16_gemm",
            params="GemmParams",
            config={
                "kKind": _C.gemm_kinds()[self.kind],
                "kBlockM": BLOCK_M,
                "kBlockN": self.block_n,
                "kBlockK": BLOCK_K,
                "kNumStages": self.num_stages,
                "kMaxGroups": self.max_groups,
                "kAMajorK": self.a_major == "k",
                "kBMajorK": self.b_major == "k",
                "D": CppType(_D_TYPES[self.d_dtype][1]),
            },
            threads=THREADS,
            arch="sm_90a",
        )


@functools.cache
def choose_config(kind: str, a_major: str, b_major: str, d_dtype: torch.dtype, n: int, num_groups: int) -> GemmConfig:
    """The widest tile that n fills, with as many stages as shared memory holds.

    128 x 256 needs the fewest shared-memory bytes per FLOP (0.0117 against 0.0156 of 128 x 128) and still fits 128 accumulator registers.
    """
    block_n = 256 if n > 128 else 128
    max_groups = max(256, 1 << (num_groups - 1).bit_length())  # 256 entries are free: shared memory is laid out in steps of 1024 bytes
    stages = max(s for s in range(2, 9) if _C.gemm_smem_bytes(BLOCK_M, block_n, BLOCK_K, s, max_groups) <= SMEM_LIMIT)
    config = GemmConfig(kind, a_major, b_major, d_dtype, block_n, stages, max_groups)
    if environment.flag("DG_PRINT_CONFIG"):
        print(f"deep_gemm: n={n} num_groups={num_groups}: {config}")
    return config


def shipped_specs() -> list[KernelSpec]:
    """The variants that the public calls and the Mega MoE use on the documented shapes (128 and 256 experts, EP1 to EP8)."""
    bf16, f32 = torch.bfloat16, torch.float32
    plain = [("dense", a, b, d, 1) for a in ("k", "mn") for b in ("k", "mn") for d in (bf16, f32)]
    grouped = [(kind, "k", b, d, 128) for kind in ("m_ends", "m_index") for b in ("k", "mn") for d in (bf16, f32)]
    grouped += [("m_masked", "k", "k", d, 128) for d in (bf16, f32)]
    grouped += [("k_ends", "mn", "mn", d, 128) for d in (bf16, f32)]
    return [choose_config(kind, a, b, d, n, groups).spec() for kind, a, b, d, groups in plain + grouped for n in (128, 256)]


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


def _operand_map(t: torch.Tensor, major: str, block_mn: int) -> bytes:
    """Rank-3 map (inner, rows, groups) of a logical [.., mn, k] view, boxes as mma/sm90.cuh lays tiles out."""
    inner, rows = (t.shape[-1], t.shape[-2]) if major == "k" else (t.shape[-2], t.shape[-1])
    row_stride = t.stride(-2) if major == "k" else t.stride(-1)
    groups, group_stride = (t.shape[0], t.stride(0)) if t.dim() == 3 else (1, 8)
    free = -(-inner // 8) * 8  # stride of a dimension that is never stepped over
    strides = [2 * (s if n > 1 else free) for n, s in ((rows, row_stride), (groups, group_stride))]
    box = (SWIZZLE_ELEMENTS, block_mn if major == "k" else BLOCK_K, 1)
    return _C.tensor_map(t.data_ptr(), "bf16", (inner, rows, groups), strides, box, 128)


def _result_map(d: torch.Tensor) -> bytes | None:
    """Rank-3 map (n, m, groups) of d [.., m, n] in boxes of 64 rows of 128 bytes, or None when TMA cannot write it."""
    size = d.element_size()
    if d.data_ptr() % 16 or any(n > 1 and s * size % 16 for n, s in zip(d.shape[:-1], d.stride()[:-1], strict=True)):
        return None
    groups, (m, n) = d.shape[0] if d.dim() == 3 else 1, d.shape[-2:]
    free = -(-n * size // 16) * 16
    strides = (d.stride(-2) * size if m > 1 else free, d.stride(0) * size if groups > 1 else free)
    return _C.tensor_map(d.data_ptr(), _D_TYPES[d.dtype][0], (n, m, groups), strides, (128 // size, 64, 1), 128)


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


def launch(
    kind: str,
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    *,
    m: int,
    layout: torch.Tensor | None = None,
    num_groups: int = 1,
    window: tuple[int, int] = NO_WINDOW,
    alignment: int = GROUP_ALIGNMENT,
    group_rows: int = 0,
    carry: tuple[torch.Tensor, torch.Tensor] | None = None,
    accumulate: bool = False,
    num_sms: int | None = None,
    stream: int | None = None,
) -> None:
    """One GEMM launch: d [.., m, n] (unit stride on n) from the logical views a [.., m, k] and b [.., n, k]."""
    n, k = b.shape[-2:]
    device = d.device.index
    if torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            return launch(kind, a, b, d, m=m, layout=layout, num_groups=num_groups, window=window, alignment=alignment, group_rows=group_rows,
                          carry=carry, accumulate=accumulate, num_sms=num_sms, stream=stream)  # fmt: skip
    a_major, b_major = ("mn", "mn") if kind == "k_ends" else (major_of(a), major_of(b))
    config = choose_config(kind, a_major, b_major, d.dtype, n, num_groups)
    d_map = _result_map(d)
    params = _C.pack(
        "GemmParams",
        a=_operand_map(a, a_major, BLOCK_M),
        b=_operand_map(b, b_major, config.block_n),
        d_map=d_map or bytes(128),
        d_has_map=d_map is not None,
        d=d.data_ptr(),
        carry_in=0 if carry is None else carry[0].data_ptr(),
        carry_out=0 if carry is None else carry[1].data_ptr(),
        group_layout=0 if layout is None else layout.data_ptr(),
        ldd=d.stride(-2),
        d_group_stride=d.stride(0) if d.dim() == 3 else 0,
        m=m,
        n=n,
        k=k,
        num_groups=num_groups,
        window_begin=window[0],
        window_end=window[1],
        alignment=alignment,
        group_rows=group_rows,
        accumulate=accumulate,
    )
    kernel = _kernel(config, device)
    stream = torch.cuda.current_stream(device).cuda_stream if stream is None else stream
    kernel.launch(params, num_sms or get_num_sms(device), config.smem_bytes, stream)


@functools.cache
def _kernel(config: GemmConfig, device: int):
    return jit.load(config.spec(), device)


def launch_m_grouped(a, b, d, group_ends, *, b_major, window=NO_WINDOW, accumulate=False, num_sms=None, stream=None) -> None:
    """d[rows of g] = a[rows of g] @ b[g]^T for the groups and the window of `group_ends` (docs/design.md, "GEMM").

    a [rows, k], d [rows, n] (a column slice is fine); b [G, n, k] for b_major "k" or [G, k, n] for "mn"; group_ends [G] int32.
    """
    weight = b if b_major == "k" else b.transpose(1, 2)
    launch("m_ends", a, weight, d, m=a.shape[0], layout=group_ends, num_groups=b.shape[0], window=window, accumulate=accumulate,
           num_sms=num_sms, stream=stream)  # fmt: skip


def launch_k_grouped(a, b, d, group_ends, *, window=NO_WINDOW, carry=None, accumulate=False, num_sms=None, stream=None) -> None:
    """d[g] (+)= a[rows of g]^T @ b[rows of g] over the window; a [rows, m], b [rows, n], d [G, m, n].

    carry [2, m, n] FP32, needed when d is BF16 and there are several windows, all of one size: a window reads the half that the window before it
    wrote and writes the other, because it may end one group's sum and begin another's.
    """
    if carry is not None:
        parity = window[0] // (window[1] - window[0]) % 2
        carry = (carry[1 - parity], carry[parity])
    launch("k_ends", a.t(), b.t(), d, m=a.shape[1], layout=group_ends, num_groups=d.shape[0], window=window, carry=carry,
           accumulate=accumulate, num_sms=num_sms, stream=stream)  # fmt: skip
