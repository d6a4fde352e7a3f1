// All ranks have come this far: one CTA, one thread per peer. See comm/barrier.cuh and docs/memory_order.md.
#pragma once
#include <deep_gemm/comm/barrier.cuh>

namespace deep_gemm::kernels {

template <class Config>
__device__ __forceinline__ void mega_moe_barrier(const MegaMoeBarrierParams& params) {
  static_assert(Config::kThreads >= DG_MAX_RANKS, "a thread per peer");
  __shared__ int first_bad;
  auto& control = *pointer<MegaMoeControl>(params.control);
  if (params.only_if_pending && !control.pending) return;
  SystemBarrier<MegaMoeBarrierParams>{params, control, first_bad}.run(params.tag, params.pending_after);
}

}  // namespace deep_gemm::kernels
