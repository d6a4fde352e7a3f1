// The frame of the fused launches: plan, tiles, combine. docs/fused_forward.md.
//
// Persistent: one CTA per SM, all of them resident. Two math warpgroups; in the third a warp that loads by TMA, one that walks the tile order, two
// that dispatch. Barriers in shared memory: mainloop/sm90_operand_ring.cuh, schedule/tile_ring.cuh, kernels/sm90_bf16_gemm.cuh (turns, named
// barriers), kernels/sm90_mega_moe_traits.cuh (dispatch, staging). In device memory: comm/grid_barrier.cuh, the counters of `ready` and of MegaMoeGrid.
//
// Direction: Traits, Waits, LoadRole, MathRole, Dispatch; combine(params), by all threads.
#pragma once
#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/arch/reg_reconfig.h>
#include <deep_gemm/comm/dispatch_role.cuh>
#include <deep_gemm/comm/router.cuh>
#include <deep_gemm/kernels/mega_moe_combine.cuh>

namespace deep_gemm::kernels {

template <class Traits, class Waits>
__device__ __forceinline__ void walk_mega_moe_tiles(const typename Traits::Params& params, typename Traits::SharedStorage& smem) {
  const int* ends = pointer<const int>(params.group_ends);
  Traits::fill(smem.schedule, params);
  dg_mega_moe_begin(&smem.schedule, ends, blockIdx.x, gridDim.x, &smem.cursor);
  Waits waits{{params}};
  smem.tiles.run([&](dg_mega_moe_tile& tile) {
    const bool more = dg_mega_moe_next_tile(&smem.schedule, ends, &smem.cursor, &tile);
    if (more && tile.step != DG_STEP_ROUND_END) waits.run(tile);
    return more;
  });
}

// Everything between the plan and the combine. Afterwards this CTA's threads are together, with equal shares of registers, and all that they
// wrote is complete. A warpgroup comes together before it changes its registers again, and the third takes its share back only when both others
// have given theirs: a warp that is done early would take what math warps still wait for.
template <class Direction>
__device__ __forceinline__ void multiply_experts(const typename Direction::Traits::Params& params, typename Direction::Traits::SharedStorage& smem) {
  using Traits = typename Direction::Traits;
  const int warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == Traits::kMathWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kLoadRegisters>();
    const int warp = cutlass::canonical_warp_idx_sync() % 4;
    if (warp == 0) typename Direction::LoadRole{params, smem}.run();
    if (warp == 1 && cute::elect_one_sync()) walk_mega_moe_tiles<Traits, typename Direction::Waits>(params, smem);
    if (warp >= 2) typename Direction::Dispatch{{params, smem, warp - 2}}.run();
    __syncwarp();  // the schedule thread's warp is together again
    __syncthreads();
    cutlass::arch::warpgroup_reg_alloc<Traits::kEvenRegisters>();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kMathRegisters>();
    typename Direction::MathRole{params, smem, warpgroup}.run();
    Warpgroup{2 + warpgroup}.sync();
    cutlass::arch::warpgroup_reg_dealloc<Traits::kEvenRegisters>();
    __syncthreads();
  }
}

template <class Direction>
__device__ __forceinline__ void run_mega_moe(const typename Direction::Traits::Params& params) {
  using Traits = typename Direction::Traits;
  using Route = Router<typename Traits::Params, Traits::kThreads>;
  // Made twice: nothing of it is worth a register of the math warps.
  const auto grid = [&] { return GridBarrier{&pointer<MegaMoeGrid>(params.grid)->barrier, 4 * params.timeout_ns}; };
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(raw);
  const auto route = [&] { return Route{params, *reinterpret_cast<typename Route::Storage*>(raw), grid()}; };
  route().run();
  ptx::fence_proxy_async();  // bulk copies read what peers stored, and write shared memory where ordinary accesses have been
  __syncthreads();
  if (threadIdx.x == 0) {
    smem.init_barriers();
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (Traits::kCluster == 1) __syncthreads(); else cute::cluster_sync();
  multiply_experts<Direction>(params, smem);
  __threadfence_system();  // rows pushed to peers
  grid().sync([&] { route().pass_barrier(params.push_tag, 0); });
  Direction::combine(params);
}

}  // namespace deep_gemm::kernels
