// CTAs that wait for each other (tests/test_simt_machine.py): each one brings its 1024 bytes at `epoch` (an address) to shared memory by a
// bulk load, adds 1 to every word, stores them to `d`, and, once all have, sums the words of the next CTA into its own word of `d` behind the
// rows.
#pragma once
#include <cutlass/arch/barrier.h>
#include <deep_gemm/layout/example_params.h>
#include <deep_gemm/ptx/bulk_copy.cuh>
#include <deep_gemm/ptx/fence.cuh>
#include <deep_gemm/ptx/memory.cuh>

namespace deep_gemm::kernels {

template <class Config>
__device__ __forceinline__ void exchange(const ExampleParams& params) {
  constexpr int kWords = 256;
  struct Shared {
    unsigned word[kWords];
    cutlass::arch::ClusterTransactionBarrier loaded;
  };
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& smem = *reinterpret_cast<Shared*>(raw);
  auto* rows = reinterpret_cast<unsigned*>(params.d);
  auto* counter = rows + gridDim.x * (kWords + 1);
  if (threadIdx.x == 0) {
    smem.loaded.init(1);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    smem.loaded.arrive_and_expect_tx(sizeof(smem.word));
    ptx::bulk_load(smem.word, reinterpret_cast<const unsigned*>(params.epoch) + blockIdx.x * kWords, sizeof(smem.word), &smem.loaded);
  }
  smem.loaded.wait(0);
  for (int i = threadIdx.x; i < kWords; i += Config::kThreads) smem.word[i] += 1;
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::bulk_store(rows + blockIdx.x * kWords, smem.word, sizeof(smem.word));
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
    ptx::red_release_gpu_add_u32(counter, 1);
    while (ptx::ld_acquire_gpu_u32(counter) < gridDim.x) __nanosleep(20);
    const unsigned* next = rows + (blockIdx.x + 1) % gridDim.x * kWords;
    unsigned sum = 0;
    for (int i = 0; i < kWords; ++i) sum += next[i];
    rows[gridDim.x * kWords + blockIdx.x] = sum;
  }
}

}  // namespace deep_gemm::kernels
