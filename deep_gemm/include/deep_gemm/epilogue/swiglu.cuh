// The gated activation and its derivative as functions of FP32 values; formulas: deep_gemm/activation.py, mirrored in reference/swiglu.py.
#pragma once
#include <deep_gemm/ptx/arithmetic.cuh>

namespace deep_gemm {

struct SwigluConstants {
  static constexpr bool kPlain = false;
  float alpha, up_offset, clamp;  // clamp = infinity: none

  __device__ __forceinline__ bool is_plain() const { return alpha == 1.f && up_offset == 0.f && clamp == __int_as_float(0x7f800000); }
};
// alpha = 1, no offset, no clamp: what most models have, with a third of the instructions left out and the same bits.
struct PlainSwiglu {
  static constexpr bool kPlain = true;
  static constexpr float alpha = 1.f, up_offset = 0.f;
};

// The forms that let NaN through: fminf would replace a NaN by the bound.
template <class Constants>
__device__ __forceinline__ float clamp_gate(float gate, const Constants& c) {
  if constexpr (Constants::kPlain) return gate;
  else return ptx::min_nan(gate, c.clamp);
}
template <class Constants>
__device__ __forceinline__ float clamp_up(float up, const Constants& c) {
  if constexpr (Constants::kPlain) return up;
  else return ptx::max_nan(ptx::min_nan(up, c.clamp), -c.clamp) + c.up_offset;
}
// exp overflows to infinity for x < -88, which gives the right limit, 0.
__device__ __forceinline__ float sigmoid(float x) { return ptx::rcp_approx(1.f + ptx::exp2_approx(x * -1.44269504f)); }

template <class Constants>
__device__ __forceinline__ float swiglu(float gate, float up, const Constants& c) {
  const float g = clamp_gate(gate, c);
  return g * sigmoid(c.alpha * g) * clamp_up(up, c);
}

struct SwigluGradient {
  float a, dgate, dup;
};
// da: gradient of the activation. A clamped value gets zero; on the bound, and for NaN, the derivative is that of the inside.
template <class Constants>
__device__ __forceinline__ SwigluGradient dswiglu(float gate, float up, float da, const Constants& c) {
  const float g = clamp_gate(gate, c), u = clamp_up(up, c), s = sigmoid(c.alpha * g), gs = g * s;
  const float dgate = da * u * s * (1.f + c.alpha * g * (1.f - s));
  if constexpr (Constants::kPlain) return {gs * u, dgate, da * gs};
  else return {gs * u, gate > c.clamp ? 0.f : dgate, fabsf(up) > c.clamp ? 0.f : da * gs};
}

}  // namespace deep_gemm
