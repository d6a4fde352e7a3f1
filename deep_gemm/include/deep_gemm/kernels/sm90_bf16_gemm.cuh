// D = A * B^T (+ D) on Hopper: BF16 operands, FP32 accumulation, D BF16 or FP32; dense, m-grouped and k-grouped (schedule/gemm_tiles.h); plain,
// or with the gated activation in the epilogue (epilogue/gated.cuh).
//
// Persistent: the CTAs, one per SM, replay one static tile order. Two math warpgroups; a warp that loads by TMA, one that walks the tile order, two
// that gather, where one operand's rows are listed. Cooperative: both math warpgroups work on one tile, 64 rows each. Ping-pong: each takes every
// other tile whole, so that one's epilogue runs beside the other's mainloop. The CTAs of a cluster share one operand tile by multicast.
//
// Config: Params (GemmParams or GemmGatedParams), kEpilogue (DG_EPILOGUE_*), kKind (DG_GEMM_*), kGather (DG_GATHER_*), kPingPong, kCluster (1 or
// 2), kBand (row blocks that sweep the columns together), kBlockM, kBlockN, kBlockK, kNumStages, kStagingBoxes, kAMajorK, kBMajorK (false:
// MN-major), D (element of the result).
// Barriers: mainloop/sm90_operand_ring.cuh, schedule/tile_ring.cuh; turn[w] (ping-pong, count 1): the other math warpgroup has seen the last
// stage of its tile full, and warpgroup w may wait for the first of its own. Earlier, a stage could be two phases behind what w waits for, which
// a parity cannot tell from done. Named barrier 1 (cooperative, all math threads): the k-tail of a k-group has been zeroed in shared
// memory; 2 and 3 (one math warpgroup): the same for ping-pong, and the epilogues.
// Cluster barrier: mbarriers are initialised before a peer uses them, and live until the last peer has.
#pragma once
#include <cutlass/arch/reg_reconfig.h>
#include <deep_gemm/mainloop/sm90_load_role.cuh>
#include <deep_gemm/mainloop/sm90_math_role.cuh>

namespace deep_gemm::kernels {

// The schedule thread. Padding blocks, which have group -1 in the tile order, are left out.
template <class Config>
__device__ __forceinline__ void walk_tiles(const typename Config::Params& params, typename GemmTraits<Config>::SharedStorage& smem) {
  const dg_gemm_problem problem = GemmTraits<Config>::problem(params);
  const int* layout = reinterpret_cast<const int*>(params.group_layout);
  dg_gemm_cursor cursor = dg_gemm_cursor_begin(blockIdx.x, gridDim.x, problem.cluster);
  smem.tiles.run([&](dg_gemm_tile& tile) {
    bool more;
    do more = dg_gemm_next_tile(&cursor, &problem, layout, &tile);
    while (more && tile.group < 0);
    return more;
  });
}

template <class Config>
__device__ __forceinline__ void sm90_bf16_gemm(const typename Config::Params& params) {
  using Traits = GemmTraits<Config>;
  // Dynamic shared memory begins at 1024 when there is no static one. Rounding up at run time instead would cost the compiler the knowledge
  // that the address is a shared one, and every access 64-bit arithmetic.
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  if (threadIdx.x == 0) {
    smem.ring.init_barriers();
    smem.tiles.init_barriers();
    for (auto& turn : smem.turn) turn.init(1);
    for (auto& state : smem.dswiglu) state.init_barriers();
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (Traits::kCluster == 1) __syncthreads(); else cute::cluster_sync();

  const int warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == Traits::kMathWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kLoadRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync() % 4;
    if (warp == 0) LoadRole<Config>{params, smem}.run();
    if (warp == 1 && cute::elect_one_sync()) walk_tiles<Config>(params, smem);
    if constexpr (Traits::kGatherWarps > 0)
      if (warp >= 2) GatherRole<Config>{params, smem}.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kMathRegisters>();
    MathRole<Config>{params, smem, warpgroup}.run();
  }
  if constexpr (Traits::kCluster > 1) {
    __syncwarp();  // the schedule thread's warp is together again
    cute::cluster_sync();
  }
}

}  // namespace deep_gemm::kernels
