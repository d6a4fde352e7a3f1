// Non-bulk asynchronous copies from global to shared memory, one PTX instruction each.
#pragma once

namespace deep_gemm::ptx {

// PTX ISA, "cp.async": 16 bytes, of which `num_bytes` are read and the rest is zero. `to`: shared address.
__device__ __forceinline__ void cp_async_16(unsigned to, const void* from, int num_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(num_bytes) : "memory");
}
// PTX ISA, "cp.async.mbarrier.arrive" with .noinc: this thread arrives at the mbarrier once all its copies so far have landed.
__device__ __forceinline__ void cp_async_arrive(unsigned barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace deep_gemm::ptx
