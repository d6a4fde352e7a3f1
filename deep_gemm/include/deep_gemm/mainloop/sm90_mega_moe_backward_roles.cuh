// What the fused backward loads, and what becomes of the sums.
//
//   step         waits for                             sums                     become
//   GEMM 1       rows of x of its block                z = x W13^T              z, where its gradient will lie
//   dgrad 2      rows of dy; where z is recomputed,    dA' = dy W2              dZ, A' and the tile's part of dp (DswigluEpilogue)
//                GEMM 1 tiles of its block
//   dgrad 1      dgrad 2 tiles of its block            dx = dZ W13              rows pushed to the tokens' owners
//   wgrad 2      all dgrad 2 tiles of the round        dW2 = dy^T A'            stored, or added
//   wgrad 1      these, and all rows of x              dW13 = dZ^T x            the same, gate and up apart
#pragma once
#include <deep_gemm/mainloop/sm90_mega_moe_roles.cuh>

namespace deep_gemm::kernels {

template <class Traits>
struct BackwardWaits : MegaMoeWaits<Traits> {
  int complete_rounds = 0;  // rounds whose rows need not be waited for any more

  __device__ __forceinline__ void run(const dg_mega_moe_tile& tile) {
    const auto& params = this->params;
    switch (tile.step) {
      case DG_STEP_GEMM1:
        return this->wait_for_block(tile, DG_READY_x, tile.block_rows);
      case DG_STEP_DGRAD2:
        if (tile.round >= params.saved_rounds) this->wait_for_block(tile, DG_READY_gemm1, Traits::gemm1_writers(params));
        return this->wait_for_block(tile, DG_READY_dy, tile.block_rows);
      case DG_STEP_DGRAD1:
        return this->wait_for_block(tile, DG_READY_dgrad2, Traits::dp_tiles(params));
      default:
        if (complete_rounds <= tile.round) wait_for_round(tile);  // a CTA may have no tile of a group in a round
        complete_rounds = tile.round + 1;
    }
  }

 private:
  // Everything that the weight gradients of the round read. The tile says how many row blocks and rows there have been.
  __device__ __forceinline__ void wait_for_round(const dg_mega_moe_tile& tile) const {
    const MegaMoeGrid* grid = pointer<const MegaMoeGrid>(this->params.grid);
    this->wait_for(&grid->dz_tiles, tile.block * Traits::dp_tiles(this->params));
    if (this->params.wants_dw13) this->wait_for(&grid->x_rows, tile.block_rows);
  }
};

template <class Traits>
struct BackwardLoads : MegaMoeLoads<Traits> {
  __device__ __forceinline__ void load(const dg_mega_moe_tile& tile, int block, int stage) const {
    const auto& params = this->params;
    const int k = tile.gemm.k_begin + block * Traits::kBlockK;
    void* full = this->begin(stage);
    switch (tile.step) {
      case DG_STEP_GEMM1:
        return this->load_gemm1(full, tile, k, stage);
      case DG_STEP_DGRAD2:
        this->template load_a<Major::kK>(&params.dy_map, full, tile, k, stage);
        return this->template load_b<Major::kMN>(&params.w2_t_map, full, tile, k, tile.gemm.group, stage);
      case DG_STEP_DGRAD1: {
        const bool gate = 2 * k < tile.gemm.k_end;
        const int column = gate ? k : k - tile.gemm.k_end / 2;
        this->template load_a<Major::kK>(gate ? &params.dz_gate_k_map : &params.dz_up_k_map, full, tile, column, stage);
        return this->template load_b<Major::kMN>(gate ? &params.gate_t_map : &params.up_t_map, full, tile, column, tile.gemm.group, stage);
      }
      case DG_STEP_WGRAD2:
        this->template load_a<Major::kMN>(&params.dy_rows_map, full, tile, k, stage);
        return this->template load_b<Major::kMN>(&params.act_rows_map, full, tile, k, 0, stage);
      default:
        this->template load_a<Major::kMN>(tile.step == DG_STEP_WGRAD_GATE ? &params.dz_gate_rows_map : &params.dz_up_rows_map, full, tile, k, stage);
        return this->template load_b<Major::kMN>(&params.x_rows_map, full, tile, k, 0, stage);
    }
  }
};

template <class Traits>
struct BackwardWork {
  using Acc = typename Traits::Acc;
  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;
  const int warpgroup;

  __device__ __forceinline__ void run(const dg_mega_moe_tile& tile, Multiplier<Traits>& multiplier, Acc (&acc)[Traits::kAtoms]) const {
    static_assert(Traits::kPingPong, "the warpgroups take turns with the staging");
    if (tile.step == DG_STEP_DGRAD2) dswiglu().prefetch(tile, 0);
    multiplier.begin_turn(tile.number / 2);
    if (tile.step == DG_STEP_GEMM1) multiplier.multiply(tile.gemm, Traits::kBlockN, acc);
    else if (tile.step <= DG_STEP_DGRAD1) multiplier.template multiply<typename Traits::DgradOperands>(tile.gemm, columns(tile), acc);
    else multiplier.template multiply<typename Traits::WgradOperands>(tile.gemm, columns(tile), acc);
    take_staging(tile.number / 2);
    if (tile.gemm.num_rows > 0) finish(tile, acc);
    hand_over_staging();
  }

 private:
  __device__ __forceinline__ Warpgroup threads() const { return {2 + warpgroup}; }
  __device__ __forceinline__ typename Traits::Dswiglu dswiglu() const { return {params, smem.staging.dswiglu, 0, threads(), smem.dswiglu}; }

  // Columns of the result from the tile's first on.
  __device__ __forceinline__ int columns(const dg_mega_moe_tile& tile) const {
    return (tile.step == DG_STEP_DGRAD2 || tile.step == DG_STEP_WGRAD2 ? params.n : params.hidden) - tile.gemm.n_begin;
  }

  // As Multiplier::begin_turn.
  __device__ __forceinline__ void take_staging(int round) const {
    smem.staged[warpgroup].wait((round ^ (warpgroup == 0)) & 1);
    threads().sync();
  }
  __device__ __forceinline__ void hand_over_staging() const {
    ptx::bulk_wait_read<0>();
    threads().sync_for_tma();
    int other = warpgroup ^ 1;
    ptx::forget(other);  // the barrier's address is not worth a register during the sums
    if (Warpgroup::leader()) smem.staged[other].arrive();
  }

  __device__ __forceinline__ void finish(const dg_mega_moe_tile& tile, const Acc (&acc)[Traits::kAtoms]) const {
    switch (tile.step) {
      case DG_STEP_GEMM1:
        typename Traits::Recompute{params, 0}.run(tile, acc);
        return count_tile<Traits>(params, tile, DG_READY_gemm1, threads());
      case DG_STEP_DGRAD2:
        return differentiate(tile, acc);
      case DG_STEP_DGRAD1:
        return typename Traits::Push{params, smem.staging.push, 0, threads()}.run(tile.gemm, acc);
      default:
        return typename Traits::Wgrad{target(tile.step), smem.staging.wgrad, 0, threads(), tile.round % 2 == 1}.run(tile.gemm, acc);
    }
  }

  __device__ __forceinline__ void differentiate(const dg_mega_moe_tile& tile, const Acc (&acc)[Traits::kAtoms]) const {
    ptx::fence_proxy_async();  // the leader loads z by TMA, which others may have written
    dswiglu().start(tile);
    dswiglu().run(tile, acc);
    count_tile<Traits>(params, tile, DG_READY_dgrad2, threads());
    if (Warpgroup::leader()) ptx::red_release_gpu_add_u32(&pointer<MegaMoeGrid>(params.grid)->dz_tiles, 1);
  }

  __device__ __forceinline__ TargetOf<WgradTarget> target(int step) const {
    static_assert(sizeof(WgradTarget) == DG_WGRAD_TARGET_BYTES);
    return {reinterpret_cast<const WgradTarget*>(&params.dw2_map), step - DG_STEP_WGRAD2};
  }
};

}  // namespace deep_gemm::kernels
