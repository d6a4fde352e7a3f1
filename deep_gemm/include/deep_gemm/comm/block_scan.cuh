// Exclusive sum over the threads of a CTA.
#pragma once

namespace deep_gemm {

template <int kThreads>
struct BlockScan {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024);
  struct Storage { int warp_sum[32]; };

  // Returns the sum of `value` over the threads before this one; `total` is the sum over all. All threads call it together.
  __device__ __forceinline__ static int exclusive(Storage& smem, int value, int& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int in_warp = inclusive_in_warp(value, lane);
    __syncthreads();  // an earlier scan's sums have been read
    if (lane == 31) smem.warp_sum[warp] = in_warp;
    __syncthreads();
    const int sums = inclusive_in_warp(lane < kThreads / 32 ? smem.warp_sum[lane] : 0, lane);  // every warp, for itself
    total = __shfl_sync(~0u, sums, 31);
    const int before = __shfl_sync(~0u, sums, warp == 0 ? 0 : warp - 1);
    return in_warp - value + (warp == 0 ? 0 : before);
  }

 private:
  __device__ __forceinline__ static int inclusive_in_warp(int value, int lane) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(~0u, value, step);
      if (lane >= step) value += left;
    }
    return value;
  }
};

}  // namespace deep_gemm
