// Mega MoE forward in one launch per rank, BF16 on Hopper: plan, dispatch, GEMM 1, SwiGLU, GEMM 2, combine. docs/fused_forward.md.
#pragma once
#include <deep_gemm/kernels/sm90_mega_moe.cuh>
#include <deep_gemm/mainloop/sm90_mega_moe_forward_roles.cuh>

namespace deep_gemm::kernels {

template <class Config>
struct MegaMoeForward {
  using Traits = MegaMoeTraits<Config>;
  using Waits = ForwardWaits<Traits>;
  using LoadRole = MegaMoeLoadRole<Traits, ForwardLoads<Traits>>;
  using MathRole = MegaMoeMathRole<Traits, ForwardWork<Traits>>;
  using Dispatch = ForwardDispatch<Traits>;

  __device__ __forceinline__ static void combine(const typename Config::Params& params) {
    combine_tokens<8>(params, pointer<const MegaMoeControl>(params.control)->aborted);
  }
};

template <class Config>
__device__ __forceinline__ void sm90_mega_moe_forward(const typename Config::Params& params) {
  run_mega_moe<MegaMoeForward<Config>>(params);
}

}  // namespace deep_gemm::kernels
