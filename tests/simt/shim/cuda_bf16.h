// BF16 as the kernels see it, on the CPU.
#pragma once
#include "simt.h"

struct __nv_bfloat16 { uint16_t bits; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(unsigned(v.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
  const unsigned raw = bits_as<unsigned>(v);
  if (v != v) return {0x7fff};
  return {static_cast<uint16_t>((raw + 0x7fff + (raw >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
