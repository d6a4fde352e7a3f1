// Non-bulk asynchronous copies from global to shared memory, one PTX instruction each.
#pragma once

namespace deep_gemm::ptx {

// PTX ISA, "cp.async": 16 bytes, of which `num_bytes` are read and the rest is zero. `to`: shared address.
__device__ __forceinline__ void cp_async_16(unsigned to, const void* from, int num_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(num_bytes) : "memory");
}
// PTX ISA, "cp.async.commit_group", "cp.async.wait_group": this thread's copies since the last commit become a group; all but the latest kPending
// groups have landed.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace deep_gemm::ptx
