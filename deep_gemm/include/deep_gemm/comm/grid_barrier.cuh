// Waits inside one grid: for a counter in device memory, and for all CTAs.
#pragma once
#include <deep_gemm/ptx/memory.cuh>

namespace deep_gemm {

// One thread. What the counting threads had written before they counted is visible afterwards. Nothing but a fault of this library makes it wait
// longer than limit_ns; then the kernel ends with an error instead of a hang.
template <class Ready>
__device__ __forceinline__ void wait_for_counter(const unsigned* counter, ptx::u64 limit_ns, Ready&& ready) {
  if (ready(ptx::ld_acquire_gpu_u32(counter))) return;
  const ptx::u64 start = ptx::globaltimer_ns();
  while (!ready(ptx::ld_acquire_gpu_u32(counter))) {
    if (ptx::globaltimer_ns() - start > limit_ns) __trap();
    __nanosleep(20);
  }
}

// All CTAs of a grid that is resident as a whole. The lower 31 bits of `word` count the CTAs that have come, the last bit changes when all have: so
// nothing is reset, and the next launch may have another number of CTAs.
struct GridBarrier {
  static constexpr unsigned kOpen = 0x80000000u;
  unsigned* word;
  const ptx::u64 limit_ns;

  // All threads of all CTAs. CTA 0 does `work` when all have come, before any may go on. What a CTA wrote before is visible to all after.
  template <class Work>
  __device__ __forceinline__ void sync(Work&& work) const {
    __syncthreads();
    if (blockIdx.x == 0) {
      const unsigned others = gridDim.x - 1;
      if (threadIdx.x == 0) wait_for_counter(word, limit_ns, [=](unsigned v) { return (v & ~kOpen) == others; });
      __syncthreads();
      work();
      __syncthreads();
      if (threadIdx.x == 0) ptx::atom_acq_rel_gpu_add_u32(word, kOpen - others);
    } else if (threadIdx.x == 0) {
      const unsigned before = ptx::atom_acq_rel_gpu_add_u32(word, 1);
      wait_for_counter(word, limit_ns, [=](unsigned v) { return ((v ^ before) & kOpen) != 0; });
    }
    __syncthreads();
  }
};

}  // namespace deep_gemm
