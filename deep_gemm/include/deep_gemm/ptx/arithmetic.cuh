// Arithmetic that CUDA C++ has no function for, one PTX instruction each.
#pragma once

namespace deep_gemm::ptx {

// PTX ISA, "min", "max" with .NaN: NaN when either operand is.
__device__ __forceinline__ float min_nan(float a, float b) {
  float v;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}
__device__ __forceinline__ float max_nan(float a, float b) {
  float v;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}

// PTX ISA, "ex2", "rcp" with .approx.ftz: relative error below 2^-22; results too small for a normal number are 0.
__device__ __forceinline__ float exp2_approx(float a) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(a));
  return v;
}
__device__ __forceinline__ float rcp_approx(float a) {
  float v;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(a));
  return v;
}

}  // namespace deep_gemm::ptx
