// BF16 as the kernels see it, on the CPU.
#pragma once
#include "simt.h"

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float v) {
    const unsigned raw = bits_as<unsigned>(v);
    bits = v != v ? 0x7fff : static_cast<uint16_t>((raw + 0x7fff + (raw >> 16 & 1)) >> 16);
  }
  operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float __bfloat162float(__nv_bfloat16 v) { return v; }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return __nv_bfloat16(v); }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
