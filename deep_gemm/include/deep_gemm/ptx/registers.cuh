// Special registers, one PTX instruction each.
#pragma once

namespace deep_gemm::ptx {

// threadIdx.x, read anew at every call: what is computed from it cannot be kept in registers across a mainloop, as the compiler would do with
// threadIdx.x itself.
__device__ __forceinline__ int thread_index_anew() {
  int thread;
  asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
  return thread;
}

// No instruction: what was computed from `value` before is not known to be so after, and need not be kept in a register meanwhile.
template <class T>
__device__ __forceinline__ void forget(T& value) {
  static_assert(sizeof(T) == 4);
  asm volatile("" : "+r"(value));
}

}  // namespace deep_gemm::ptx
