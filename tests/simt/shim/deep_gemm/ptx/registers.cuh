// ptx/registers.cuh on the CPU.
#pragma once
#include "simt.h"

namespace deep_gemm::ptx {
inline int thread_index_anew() { return threadIdx.x; }
template <class T> void forget(T&) { static_assert(sizeof(T) == 4); }
}  // namespace deep_gemm::ptx
