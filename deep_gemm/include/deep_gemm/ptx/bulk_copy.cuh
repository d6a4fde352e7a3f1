// Bulk asynchronous copies of contiguous bytes, one PTX instruction each. Addresses and sizes are multiples of 16; global addresses may be a peer's.
#pragma once

namespace deep_gemm::ptx {

__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// PTX ISA, "cp.async.bulk": global to shared memory; the bytes count on the mbarrier's transactions when they have landed.
__device__ __forceinline__ void bulk_load(void* to, const void* from, unsigned bytes, void* mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(mbarrier))
               : "memory");
}
// Shared to global memory, in this thread's current bulk group.
__device__ __forceinline__ void bulk_store(void* to, const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)), "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
// PTX ISA, "cp.async.bulk.commit_group", "cp.async.bulk.wait_group": groups of this thread, TMA tensor stores among them.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but the latest kPending groups have read their sources.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// All but the latest kPending groups are complete: what they wrote is visible to this thread.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace deep_gemm::ptx
