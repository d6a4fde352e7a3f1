// What the roles around the tiles of a fused launch have in common; what each direction loads and does with the sums is in
// sm90_mega_moe_forward_roles.cuh and sm90_mega_moe_backward_roles.cuh.
//
// A tile waits for counters of its row block, or of the round. The schedule thread waits before it hands the tile on, a few tiles ahead, so that the
// time a counter takes to be read is nobody's; math warps see a tile when its operands have landed.
#pragma once
#include <cute/arch/cluster_sm90.hpp>
#include <deep_gemm/comm/grid_barrier.cuh>
#include <deep_gemm/kernels/sm90_mega_moe_traits.cuh>
#include <deep_gemm/mainloop/sm90_math_role.cuh>

namespace deep_gemm::kernels {

// One warp, one elected thread of which issues. Loads: {params, smem}, load(tile, k block, stage).
template <class Traits, class Loads>
struct MegaMoeLoadRole {
  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;

  __device__ __forceinline__ void run() {
    typename Traits::Ring::Position at;
    typename Traits::TileQueue::Reader tiles{smem.tiles};
    const Loads loads{params, smem};
    for (; tiles.next(); tiles.release()) {
      const dg_mega_moe_tile tile = tiles.tile();
      if (tile.step == DG_STEP_ROUND_END) continue;
      ptx::fence_proxy_async();  // TMA reads what others wrote, for which the schedule thread has waited
      for (int block = 0; block < Traits::k_blocks(tile.gemm); ++block, at.advance()) {
        smem.ring.empty[at.stage].wait(at.phase ^ 1);
        if (cute::elect_one_sync()) loads.load(tile, block, at.stage);
      }
    }
  }
};

// Waits that both directions have.
template <class Traits>
struct MegaMoeWaits {
  const typename Traits::Params& params;

 protected:
  __device__ __forceinline__ void wait_for(const unsigned* counter, unsigned expected) const {
    wait_for_counter(counter, params.timeout_ns, [=](unsigned v) { return v >= expected; });
  }
  __device__ __forceinline__ void wait_for_block(const dg_mega_moe_tile& tile, int kind, unsigned expected) const {
    wait_for(Traits::ready(params, kind, tile.block), expected);
  }
};

// Loads that both directions have.
template <class Traits>
struct MegaMoeLoads {
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kBlockK = Traits::kBlockK, kCluster = Traits::kCluster;
  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;

 protected:
  // The stage's barrier, told what will land.
  __device__ __forceinline__ void* begin(int stage) const {
    smem.ring.full[stage].arrive_and_expect_tx(Traits::kStageBytes);
    return &smem.ring.full[stage];
  }
  __device__ __forceinline__ static int cta() { return kCluster == 1 ? 0 : cute::block_rank_in_cluster(); }

  template <Major kMajor>
  __device__ __forceinline__ void load_a(const void* map, void* full, const dg_mega_moe_tile& tile, int k, int stage) const {
    load_operand<kMajor, kBlockM, kBlockK, kCluster>(map, full, smem.operands.a[stage], tile.gemm.m_begin, k, 0, tile.gemm.share == DG_GEMM_SHARE_A,
                                                     cta());
  }
  template <Major kMajor>
  __device__ __forceinline__ void load_b(const void* map, void* full, const dg_mega_moe_tile& tile, int k, int group, int stage) const {
    load_operand<kMajor, kBlockN, kBlockK, kCluster>(map, full, smem.operands.b[stage], tile.gemm.n_begin, k, group,
                                                     tile.gemm.share == DG_GEMM_SHARE_B, cta());
  }
  // GEMM 1: rows of x, and gate and up of the same columns.
  __device__ __forceinline__ void load_gemm1(void* full, const dg_mega_moe_tile& tile, int k, int stage) const {
    load_a<Major::kK>(&params.x_map, full, tile, k, stage);
    load_gate_up<Major::kK, kBlockN, kBlockK, kCluster>(&params.gate_map, &params.up_map, full, smem.operands.b[stage], tile.gemm.n_begin, k,
                                                        tile.gemm.group, tile.gemm.share == DG_GEMM_SHARE_B, cta());
  }
};

// One warpgroup of math. Work: {params, smem, warpgroup}, run(tile, multiplier, acc): the sums of a tile, and what becomes of them.
template <class Traits, class Work>
struct MegaMoeMathRole {
  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;
  const int warpgroup;

  __device__ __forceinline__ void run() {
    typename Traits::TileQueue::Reader tiles{smem.tiles};
    Multiplier<Traits> multiplier{smem, warpgroup};
    Work work{params, smem, warpgroup};
    for (; tiles.next(); tiles.release()) {
      const dg_mega_moe_tile& tile = tiles.tile();
      if (tile.step == DG_STEP_ROUND_END) {
        leave_round(tile.round);
      } else if (!Traits::kPingPong || tile.number % 2 == warpgroup) {
        typename Traits::Acc acc[Traits::kAtoms];
        multiplier.at = Traits::Ring::Position::after(tile.k_before);
        work.run(tile, multiplier, acc);
      }
      tiles.number = tile.number + tile.round;  // as it is; read anew, it needs no register during the sums
    }
    ptx::bulk_wait<0>();
  }

 private:
  // Everything that this warpgroup wrote in the round is complete.
  __device__ __forceinline__ void leave_round(int round) const {
    ptx::bulk_wait<0>();
    Warpgroup{2 + warpgroup}.sync();
    if (Warpgroup::leader()) Traits::leave_round(params, round);
  }
};

// After a warpgroup's ordinary stores of a tile: counts it on `kind` of its row block. TMA of other SMs will read them.
template <class Traits>
__device__ __forceinline__ void count_tile(const typename Traits::Params& params, const dg_mega_moe_tile& tile, int kind, Warpgroup threads) {
  ptx::fence_proxy_async();
  threads.sync();
  if (Warpgroup::leader()) ptx::red_release_gpu_add_u32(Traits::ready(params, kind, tile.block), 1);
}

}  // namespace deep_gemm::kernels
