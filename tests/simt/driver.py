"""Stands in for the driver's tensor maps: writes what was asked for, in the form of simt::TensorMap (copies.h)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from deep_gemm import _C

_U64, _U32 = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint32)
_MAGIC = 0x544D4150
_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}  # by CUtensorMapDataType
_SWIZZLE_BYTES = (0, 32, 64, 128)  # by CUtensorMapSwizzle


class _TensorMap(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("strides", ctypes.c_uint64 * 4),
        ("dims", ctypes.c_uint32 * 5),
        ("magic", ctypes.c_uint32),
        ("box", ctypes.c_uint16 * 5),
        ("rank", ctypes.c_uint8),
        ("element_bytes", ctypes.c_uint8),
        ("swizzle_bytes", ctypes.c_uint8),
        ("dtype", ctypes.c_uint8),
    ]


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, _U64, _U64, _U32, _U32, *[ctypes.c_int] * 4
)
def _encode(to, dtype, rank, address, dims, strides, box, element_strides, interleave, swizzle, l2_promotion, oob_fill):
    if interleave or oob_fill or any(element_strides[i] != 1 for i in range(rank)):
        return 1  # the machine does not know these
    made = _TensorMap(
        address=address, magic=_MAGIC, rank=rank, element_bytes=_ELEMENT_BYTES[dtype], swizzle_bytes=_SWIZZLE_BYTES[swizzle], dtype=dtype
    )
    made.dims[:rank], made.box[:rank], made.strides[: rank - 1] = dims[:rank], box[:rank], strides[: rank - 1]
    ctypes.memset(to, 0, 128)
    ctypes.memmove(to, ctypes.byref(made), ctypes.sizeof(made))
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int)
def _not_here():
    return 999


@contextlib.contextmanager
def tensor_maps() -> Iterator[None]:
    """While it runs, `_C.tensor_map` makes maps for the SIMT machine; launches by the driver fail."""
    encode, other = (ctypes.cast(f, ctypes.c_void_p).value for f in (_encode, _not_here))
    _C.set_driver(cuCtxGetCurrent=other, cuLaunchKernelEx=other, cuTensorMapEncodeTiled=encode)
    try:
        yield
    finally:
        _C.set_driver(cuCtxGetCurrent=0, cuLaunchKernelEx=0, cuTensorMapEncodeTiled=0)
