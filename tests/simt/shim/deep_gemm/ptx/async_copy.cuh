// ptx/async_copy.cuh on the CPU.
#pragma once
#include "hopper.h"

namespace deep_gemm::ptx {
inline void cp_async_16(unsigned to, const void* from, int num_bytes) { simt::copy_16(to, from, num_bytes); }
inline void cp_async_arrive(unsigned barrier) { simt::copies_arrive(barrier); }
}  // namespace deep_gemm::ptx
