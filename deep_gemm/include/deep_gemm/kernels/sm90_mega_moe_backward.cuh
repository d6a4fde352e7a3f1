// Mega MoE backward in one launch per rank, BF16 on Hopper: plan, dispatch of dy (and x), GEMM 1 where z was not saved, dgrad 2 with dSwiGLU, dgrad 1,
// combine of dx and dp, both weight gradients. docs/fused_backward.md.
#pragma once
#include <deep_gemm/kernels/sm90_mega_moe.cuh>
#include <deep_gemm/mainloop/sm90_mega_moe_backward_roles.cuh>

namespace deep_gemm::kernels {

template <class Config>
struct MegaMoeBackward {
  using Traits = MegaMoeBackwardTraits<Config>;
  using Waits = BackwardWaits<Traits>;
  using LoadRole = MegaMoeLoadRole<Traits, BackwardLoads<Traits>>;
  using MathRole = MegaMoeMathRole<Traits, BackwardWork<Traits>>;
  using Dispatch = BackwardDispatch<Traits>;

  // dx of a token is the plain sum of its slots.
  __device__ __forceinline__ static void combine(const typename Config::Params& params) {
    const bool aborted = pointer<const MegaMoeControl>(params.control)->aborted;
    const MegaMoeCombineParams sums = {params.slots, 0, params.slot_expert, params.out, params.dp_slots, params.dp_out, params.control, params.num_tokens,
                                       params.num_topk, params.hidden};
    if (params.wants_dp) combine_dp(sums, aborted);
    if (params.wants_dx) combine_tokens<8>(sums, aborted);
  }
};

template <class Config>
__device__ __forceinline__ void sm90_mega_moe_backward(const typename Config::Params& params) {
  run_mega_moe<MegaMoeBackward<Config>>(params);
}

}  // namespace deep_gemm::kernels
