// What the roles of the fused forward share: sizes, tiles, shared memory.
//
// Config: Params (MegaMoeForwardParams), kPingPong, kCluster, kBand, kBlockM, kBlockN (GEMM 1: half gate, half up), kBlockK, kNumStages,
// kStagingBoxes (of SwigluEpilogue).
#pragma once
#include <deep_gemm/epilogue/gated.cuh>
#include <deep_gemm/epilogue/push.cuh>
#include <deep_gemm/layout/mega_moe_params.h>
#include <deep_gemm/mainloop/sm90_operand_ring.cuh>
#include <deep_gemm/schedule/mega_moe_tiles.h>
#include <deep_gemm/schedule/tile_ring.cuh>

namespace deep_gemm {

// What one dispatch warp keeps in shared memory.
struct DispatchStorage {
  alignas(128) uint8_t slot[DG_DISPATCH_SLOTS][DG_DISPATCH_CHUNK];
};
// full[i], count 1: the lane that issues the load, with the expected bytes; a chunk has landed in slot i. Waited on by the warp.
struct DispatchBarriers {
  cutlass::arch::ClusterTransactionBarrier full[DG_DISPATCH_SLOTS];
};

namespace kernels {

template <class Config>
struct MegaMoeTraits {
  using Params = typename Config::Params;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kBlockK = Config::kBlockK, kStages = Config::kNumStages;
  static constexpr bool kPingPong = Config::kPingPong, kKGrouped = false;
  static constexpr int kCluster = Config::kCluster, kGatherWarps = 0;
  static constexpr int kMathWarpgroups = 2, kMathThreads = kMathWarpgroups * 128, kThreads = kMathThreads + 128;
  static constexpr int kReaders = kPingPong ? 1 : kMathWarpgroups;
  static constexpr int kAtoms = kBlockM / kWgmmaM / kReaders;
  static constexpr int kEvenRegisters = 168, kLoadRegisters = 40, kMathRegisters = 232;
  static_assert(128 * kLoadRegisters + kMathThreads * kMathRegisters <= 65536 / kThreads / 8 * 8 * kThreads);
  static_assert(kBlockM == DG_MEGA_MOE_ROW_ALIGN, "a tile has one row block, which the counters count");
  using TileA = OperandTile<Major::kK, kBlockM, kBlockK>;
  using TileB = OperandTile<Major::kK, kBlockN, kBlockK>;
  using Ring = OperandRing<TileA, TileB, kStages, kReaders, kCluster, 0>;
  static constexpr uint32_t kStageBytes = TileA::kBytes + TileB::kBytes;
  using Acc = Accumulator<kBlockN>;
  using TileQueue = TileRing<dg_mega_moe_tile, 1 + kMathThreads / 32>;  // read by the warp that loads and every math warp
  using Swiglu = SwigluEpilogue<Config>;
  using Push = PushEpilogue<Config>;

  union Staging {
    typename Swiglu::Storage swiglu;
    typename Push::Storage push;
    uint8_t bytes[dg_mega_moe_staging_bytes(kBlockN)];
  };
  // Barriers and tiles come first: their addresses are small offsets of one that every role keeps.
  struct SharedStorage {
    TileQueue tiles;
    typename Ring::Barriers ring;
    cutlass::arch::ClusterBarrier turn[kMathWarpgroups];
    DispatchBarriers dispatch_barriers[DG_DISPATCH_WARPS];
    // Of the schedule thread. Here, as its registers are few and the two GEMMs' sizes are indexed.
    dg_mega_moe_schedule schedule;
    dg_mega_moe_cursor cursor;
    typename Ring::Tiles operands;
    Staging staging[kMathWarpgroups];
    DispatchStorage dispatch[DG_DISPATCH_WARPS];
  };
  static_assert(sizeof(SharedStorage) == dg_mega_moe_forward_smem_bytes(kBlockN, kStages));

  __device__ __forceinline__ static void fill(dg_mega_moe_schedule& schedule, const Params& params) {
    const int groups = params.num_local_experts, n = params.n, hidden = params.hidden;
    schedule.gemm[DG_MEGA_MOE_GEMM1] = {DG_GEMM_M_ENDS, kBlockM, kBlockN / 2, kCluster, Config::kBand, 0, n, hidden, groups, 0, 0, kBlockM, 0};
    schedule.gemm[DG_MEGA_MOE_GEMM2] = {DG_GEMM_M_ENDS, kBlockM, kBlockN, kCluster, Config::kBand, 0, hidden, n, groups, 0, 0, kBlockM, 0};
    schedule.num_groups = groups;
    schedule.capacity_rows = params.capacity_rows;
    schedule.unit_rows = params.unit_rows;
    schedule.lag_tiles = params.lag_tiles;
  }
  __device__ __forceinline__ static int k_blocks(const dg_gemm_tile& tile) { return tile.k_end / kBlockK; }
  // act_ready of a row block once GEMM 1 has written all of it.
  __device__ __forceinline__ static unsigned act_writers(const Params& params) {
    return static_cast<unsigned>(dg_ceil_div(params.n, kBlockN / 2)) * kReaders;
  }
  __device__ __forceinline__ static unsigned* x_ready(const Params& params, int block) { return pointer<unsigned>(params.x_ready) + block; }
  __device__ __forceinline__ static unsigned* act_ready(const Params& params, int block) { return pointer<unsigned>(params.act_ready) + block; }
};

}  // namespace kernels
}  // namespace deep_gemm
