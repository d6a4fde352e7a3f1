// 8 neighbouring values of a row in FP32 registers: how the element-wise kernels read and write memory (16 bytes of BF16, 32 of FP32).
#pragma once
#include <cuda_bf16.h>
#include <deep_gemm/ptx/memory.cuh>

namespace deep_gemm {

struct F32x8 {
  float value[8];
  __device__ __forceinline__ float& operator[](int i) { return value[i]; }
  __device__ __forceinline__ float operator[](int i) const { return value[i]; }
};

__device__ __forceinline__ F32x8 unpack_bf16(uint4 raw) {
  F32x8 v;
  const unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // BF16 is the upper half of FP32
    v[2 * i] = __uint_as_float(word[i] << 16);
    v[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
  }
  return v;
}
__device__ __forceinline__ uint4 pack_bf16(const F32x8& v) {
  uint4 raw;
  auto* pair = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
  return raw;
}

__device__ __forceinline__ F32x8 load8(const __nv_bfloat16* p) { return unpack_bf16(*reinterpret_cast<const uint4*>(p)); }
__device__ __forceinline__ F32x8 load8(const float* p) {
  const float4 low = reinterpret_cast<const float4*>(p)[0], high = reinterpret_cast<const float4*>(p)[1];
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}
__device__ __forceinline__ void store8(__nv_bfloat16* p, const F32x8& v) { *reinterpret_cast<uint4*>(p) = pack_bf16(v); }
__device__ __forceinline__ void store8(float* p, const F32x8& v) {
  reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

__device__ __forceinline__ void add8(F32x8& v, const F32x8& w) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] += w[i];
}

}  // namespace deep_gemm
