// The gated activation and its derivative as functions of FP32 values; formulas: deep_gemm/activation.py, mirrored in reference/swiglu.py.
#pragma once

namespace deep_gemm {

struct SwigluConstants {
  float alpha, up_offset, clamp;  // clamp = infinity: none
};

// Comparisons, not fminf: a NaN must come out as NaN, and fminf would replace it by the bound.
__device__ __forceinline__ float clamp_gate(float gate, const SwigluConstants& c) { return gate > c.clamp ? c.clamp : gate; }
__device__ __forceinline__ float clamp_up(float up, const SwigluConstants& c) {
  return up > c.clamp ? c.clamp : up < -c.clamp ? -c.clamp : up;
}
// exp overflows to infinity for x < -88, which gives the right limit, 0.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }

__device__ __forceinline__ float swiglu(float gate, float up, const SwigluConstants& c) {
  const float g = clamp_gate(gate, c);
  return g * sigmoid(c.alpha * g) * (clamp_up(up, c) + c.up_offset);
}

struct SwigluGradient {
  float a, dgate, dup;
};
// da: gradient of the activation. A clamped value gets zero; on the bound, and for NaN, the derivative is that of the inside.
__device__ __forceinline__ SwigluGradient dswiglu(float gate, float up, float da, const SwigluConstants& c) {
  const float g = clamp_gate(gate, c), u = clamp_up(up, c) + c.up_offset, s = sigmoid(c.alpha * g), gs = g * s;
  const float dgate = da * u * s * (1.f + c.alpha * g * (1.f - s));
  return {gs * u, gate > c.clamp ? 0.f : dgate, fabsf(up) > c.clamp ? 0.f : da * gs};
}

}  // namespace deep_gemm
