// ptx/arithmetic.cuh on the CPU.
#pragma once
#include <cmath>

namespace deep_gemm::ptx {

inline float min_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : a < b ? a : b; }
inline float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : a > b ? a : b; }
inline float exp2_approx(float a) { return std::exp2(a); }
inline float rcp_approx(float a) { return 1.f / a; }

}  // namespace deep_gemm::ptx
