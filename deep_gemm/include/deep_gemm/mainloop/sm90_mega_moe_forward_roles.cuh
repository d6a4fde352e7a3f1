// What the fused forward loads, and what becomes of the sums. A GEMM 1 tile waits for the rows of x of its block (comm/dispatch_role.cuh counts
// them), a GEMM 2 tile for the block's GEMM 1 tiles.
#pragma once
#include <deep_gemm/mainloop/sm90_mega_moe_roles.cuh>

namespace deep_gemm::kernels {

template <class Traits>
struct ForwardWaits : MegaMoeWaits<Traits> {
  __device__ __forceinline__ void run(const dg_mega_moe_tile& tile) const {
    if (tile.step == DG_STEP_GEMM1) this->wait_for_block(tile, DG_READY_x, tile.block_rows);
    else this->wait_for_block(tile, DG_READY_gemm1, Traits::gemm1_writers(this->params));
  }
};

template <class Traits>
struct ForwardLoads : MegaMoeLoads<Traits> {
  __device__ __forceinline__ void load(const dg_mega_moe_tile& tile, int block, int stage) const {
    const int k = block * Traits::kBlockK;
    void* full = this->begin(stage);
    if (tile.step == DG_STEP_GEMM1) {
      this->load_gemm1(full, tile, k, stage);
    } else {
      this->template load_a<Major::kK>(&this->params.act_map, full, tile, k, stage);
      this->template load_b<Major::kK>(&this->params.w2_map, full, tile, k, tile.gemm.group, stage);
    }
  }
};

template <class Traits>
struct ForwardWork {
  using Acc = typename Traits::Acc;
  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;
  const int warpgroup;

  __device__ __forceinline__ void run(const dg_mega_moe_tile& tile, Multiplier<Traits>& multiplier, Acc (&acc)[Traits::kAtoms]) const {
    if (Traits::kPingPong) multiplier.begin_turn(tile.number / 2);
    multiplier.multiply(tile.gemm, tile.step == DG_STEP_GEMM1 ? Traits::kBlockN : params.hidden - tile.gemm.n_begin, acc);
    if (tile.gemm.num_rows == 0) return;
    if (tile.step == DG_STEP_GEMM1) {
      typename Traits::Swiglu{params, multiplier.first_row()}.run(tile, acc);
      count_tile<Traits>(params, tile, DG_READY_gemm1, threads());
    } else {
      typename Traits::Push{params, staging(), multiplier.first_row(), threads()}.run(tile.gemm, acc);
    }
  }

 private:
  __device__ __forceinline__ Warpgroup threads() const { return {2 + warpgroup}; }
  // Its address is not worth a register during the sums.
  __device__ __forceinline__ typename Traits::Push::Storage& staging() const {
    int index = warpgroup;
    ptx::forget(index);
    return smem.staging[index];
  }
};

}  // namespace deep_gemm::kernels
