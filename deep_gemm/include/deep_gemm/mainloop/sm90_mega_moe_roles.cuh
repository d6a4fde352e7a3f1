// The roles of the fused forward around its tiles: what loads them and what multiplies them.
//
// A GEMM 1 tile waits for x_ready of its row block (comm/dispatch_role.cuh counts there), a GEMM 2 tile for act_ready, on which every math
// warpgroup counts that has written its part of a GEMM 1 tile. Only the load warp waits: math warps see a tile when its operands have landed.
#pragma once
#include <cute/arch/cluster_sm90.hpp>
#include <deep_gemm/comm/grid_barrier.cuh>
#include <deep_gemm/kernels/sm90_mega_moe_traits.cuh>
#include <deep_gemm/mainloop/sm90_math_role.cuh>

namespace deep_gemm::kernels {

// One warp, one elected thread of which waits and issues.
template <class Config>
struct MegaMoeLoadRole {
  using Traits = MegaMoeTraits<Config>;
  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;

  __device__ __forceinline__ void run() {
    typename Traits::Ring::Position at;
    typename Traits::TileQueue::Reader tiles{smem.tiles};
    for (; tiles.next(); tiles.release()) {
      const dg_mega_moe_tile tile = tiles.tile();
      if (tile.step == DG_MEGA_MOE_ROUND_END) continue;
      if (cute::elect_one_sync()) wait_for_rows(tile);
      __syncwarp();
      for (int block = 0; block < Traits::k_blocks(tile.gemm); ++block, at.advance()) {
        smem.ring.empty[at.stage].wait(at.phase ^ 1);
        if (cute::elect_one_sync()) load(tile, block * Traits::kBlockK, at.stage);
      }
    }
  }

 private:
  __device__ __forceinline__ void wait_for_rows(const dg_mega_moe_tile& tile) const {
    const bool first = tile.step == DG_MEGA_MOE_GEMM1;
    const unsigned* counter = first ? Traits::x_ready(params, tile.block) : Traits::act_ready(params, tile.block);
    const unsigned expected = first ? tile.block_rows : Traits::act_writers(params);
    wait_for_counter(counter, params.timeout_ns, [=](unsigned v) { return v >= expected; });
    ptx::fence_proxy_async();  // TMA reads what others wrote
  }

  __device__ __forceinline__ void load(const dg_mega_moe_tile& tile, int k, int stage) const {
    constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kBlockK = Traits::kBlockK, kCluster = Traits::kCluster;
    const bool first = tile.step == DG_MEGA_MOE_GEMM1, share_b = tile.gemm.share == DG_GEMM_SHARE_B;
    const int cta = kCluster == 1 ? 0 : cute::block_rank_in_cluster();
    auto* full = &smem.ring.full[stage];
    full->arrive_and_expect_tx(Traits::kStageBytes);
    load_operand<Major::kK, kBlockM, kBlockK, kCluster>(first ? &params.x_map : &params.act_map, full, smem.operands.a[stage], tile.gemm.m_begin, k,
                                                        0, tile.gemm.share == DG_GEMM_SHARE_A, cta);
    if (first) {
      load_gate_up<Major::kK, kBlockN, kBlockK, kCluster>(&params.gate_map, &params.up_map, full, smem.operands.b[stage], tile.gemm.n_begin, k,
                                                          tile.gemm.group, share_b, cta);
    } else {
      load_operand<Major::kK, kBlockN, kBlockK, kCluster>(&params.w2_map, full, smem.operands.b[stage], tile.gemm.n_begin, k, tile.gemm.group,
                                                          share_b, cta);
    }
  }
};

// One warpgroup of math.
template <class Config>
struct MegaMoeMathRole {
  using Traits = MegaMoeTraits<Config>;
  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;
  const int warpgroup;

  __device__ __forceinline__ void run() {
    typename Traits::TileQueue::Reader tiles{smem.tiles};
    Multiplier<Traits> multiplier{smem, warpgroup};
    for (; tiles.next(); tiles.release()) {
      const dg_mega_moe_tile& tile = tiles.tile();
      if (tile.step == DG_MEGA_MOE_ROUND_END) {
        leave_round();
      } else if (!Traits::kPingPong || tile.number % 2 == warpgroup) {
        typename Traits::Acc acc[Traits::kAtoms];
        multiplier.at = Traits::Ring::Position::after(tile.k_before / Traits::kBlockK);
        if (Traits::kPingPong) multiplier.begin_turn(tile.number / 2);
        multiplier.multiply(tile.gemm, tile.step == DG_MEGA_MOE_GEMM1 ? Traits::kBlockN : params.hidden - tile.gemm.n_begin, acc);
        if (tile.step == DG_MEGA_MOE_GEMM1) activate(tile, acc, multiplier.first_row());
        else typename Traits::Push{params, staging().push, multiplier.first_row(), threads()}.run(tile.gemm, acc);
      }
      tiles.number = tile.number + tile.round;  // as it is; read anew, it needs no register during the sums
    }
    ptx::bulk_wait<0>();
  }

 private:
  __device__ __forceinline__ Warpgroup threads() const { return {2 + warpgroup}; }
  // Its address is not worth a register during the sums.
  __device__ __forceinline__ typename Traits::Staging& staging() const {
    int index = warpgroup;
    ptx::forget(index);
    return smem.staging[index];
  }

  // a, and z in the first round, from the sums; then says so.
  __device__ __forceinline__ void activate(const dg_mega_moe_tile& tile, const typename Traits::Acc (&acc)[Traits::kAtoms], int first_row) const {
    if (tile.gemm.num_rows == 0) return;
    ptx::bulk_wait_read<0>();  // rows that this thread pushed from the same staging
    threads().sync();
    typename Traits::Swiglu{params, staging().swiglu, first_row, threads()}.run(tile, acc);
    if (!Warpgroup::leader()) return;  // it issued all stores
    ptx::bulk_wait<0>();
    ptx::fence_proxy_async();
    ptx::red_release_gpu_add_u32(Traits::act_ready(params, tile.block), 1);
  }

  // Everything that this warpgroup wrote in the round is complete.
  __device__ __forceinline__ void leave_round() const {
    ptx::bulk_wait<0>();
    threads().sync();
    if (Warpgroup::leader()) ptx::red_release_gpu_add_u32(&pointer<MegaMoeGrid>(params.grid)->rounds_done, 1);
  }
};

}  // namespace deep_gemm::kernels
