// Shared memory through which one math warpgroup hands results to TMA: boxes of 64 rows whose 16-byte chunks are permuted as the tensor map's
// swizzle says, which keeps the accumulator's layout free of bank conflicts.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <deep_gemm/mma/sm90.cuh>
#include <deep_gemm/ptx/fence.cuh>
#include <deep_gemm/ptx/registers.cuh>

namespace deep_gemm {

// Byte offset of 16-byte chunk `chunk` of row `row` in a box of kRowBytes (128 or 64) per row under the swizzle of that width.
template <int kRowBytes>
__device__ __forceinline__ int box_offset(int row, int chunk) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  return row * kRowBytes + (chunk ^ (kRowBytes == 128 ? row % 8 : row / 2 % 4)) * 16;
}

// The threads of one math warpgroup. `barrier`: a named barrier of their own.
struct Warpgroup {
  const int barrier;

  __device__ __forceinline__ static bool leader() { return threadIdx.x % 128 == 0; }
  __device__ __forceinline__ void sync() const { cutlass::arch::NamedBarrier::sync(128, barrier); }
  // What ordinary stores wrote to shared memory becomes visible to TMA operations that the leader issues after this.
  __device__ __forceinline__ void sync_for_tma() const {
    ptx::fence_proxy_async_shared();
    sync();
  }
  // All but the latest kPending groups of TMA stores have read their boxes; all threads may write these after the sync.
  template <int kPending>
  __device__ __forceinline__ void wait_until_read() const {
    if (leader()) cute::tma_store_wait<kPending>();
    sync();
  }
};

}  // namespace deep_gemm
