// What the roles of the fused launches share: sizes, tiles, counters, shared memory.
//
// Config: Params (MegaMoeForwardParams or MegaMoeBackwardParams), kPingPong, kCluster, kBand, kBlockM, kBlockN (GEMM 1: half gate, half up), kBlockK,
// kNumStages; backward: kStagingBoxes and D (element) of the weight gradients.
#pragma once
#include <deep_gemm/epilogue/gated.cuh>
#include <deep_gemm/epilogue/push.cuh>
#include <deep_gemm/epilogue/store.cuh>
#include <deep_gemm/layout/mega_moe_params.h>
#include <deep_gemm/mainloop/sm90_operand_ring.cuh>
#include <deep_gemm/schedule/mega_moe_tiles.h>
#include <deep_gemm/schedule/tile_ring.cuh>

namespace deep_gemm {

// What one dispatch warp keeps in shared memory: chunks of rows.
struct DispatchStorage {
  alignas(128) uint8_t slot[DG_DISPATCH_SLOTS][DG_DISPATCH_CHUNK];
};
// full[i], count 1: the lane that issues the load, with the expected bytes; a chunk has landed in slot i. Waited on by the warp.
// round: that the warp works on; here, as it has few registers.
struct DispatchBarriers {
  cutlass::arch::ClusterTransactionBarrier full[DG_DISPATCH_SLOTS];
  volatile int round;
};

namespace kernels {

// Operands of a step, for Multiplier: K-major A and B (GEMM 1, GEMM 2); B with k as its rows (dgrads); both (weight gradients).
template <class Config, Major kMajorA, Major kMajorB>
struct StepOperands {
  using TileA = OperandTile<kMajorA, Config::kBlockM, Config::kBlockK>;
  using TileB = OperandTile<kMajorB, Config::kBlockN, Config::kBlockK>;
  static constexpr bool kKGrouped = kMajorA == Major::kMN;
};

// Of both directions.
template <class Config>
struct MegaMoeTiles : StepOperands<Config, Major::kK, Major::kK> {
  using Operands = StepOperands<Config, Major::kK, Major::kK>;
  using Params = typename Config::Params;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kBlockK = Config::kBlockK, kStages = Config::kNumStages;
  static constexpr bool kPingPong = Config::kPingPong;
  static constexpr int kCluster = Config::kCluster, kGatherWarps = 0;
  static constexpr int kMathWarpgroups = 2, kMathThreads = kMathWarpgroups * 128, kThreads = kMathThreads + 128;
  static constexpr int kReaders = kPingPong ? 1 : kMathWarpgroups;
  static constexpr int kAtoms = kBlockM / kWgmmaM / kReaders;
  static constexpr int kEvenRegisters = 168, kLoadRegisters = 40, kMathRegisters = 232;
  static_assert(128 * kLoadRegisters + kMathThreads * kMathRegisters <= 65536 / kThreads / 8 * 8 * kThreads);
  static_assert(kBlockM == DG_MEGA_MOE_ROW_ALIGN, "a tile has one row block, which the counters count");
  static_assert(kBlockK == DG_K_BLOCK && kBlockN == DG_MEGA_MOE_BLOCK_N);
  using Ring = OperandRing<typename Operands::TileA, typename Operands::TileB, kStages, kReaders, kCluster, 0>;
  static constexpr uint32_t kStageBytes = Operands::TileA::kBytes + Operands::TileB::kBytes;
  using Acc = Accumulator<kBlockN>;
  using TileQueue = TileRing<dg_mega_moe_tile, 1 + kMathThreads / 32>;  // read by the warp that loads and every math warp

  // Barriers and tiles come first: their addresses are small offsets of one that every role keeps.
  struct Common {
    TileQueue tiles;
    typename Ring::Barriers ring;
    cutlass::arch::ClusterBarrier turn[kMathWarpgroups];
    DispatchBarriers dispatch_barriers[DG_DISPATCH_WARPS];
    // Of the schedule thread. Here, as its registers are few and the steps are indexed.
    dg_mega_moe_schedule schedule;
    dg_mega_moe_cursor cursor;

    __device__ __forceinline__ void init_barriers() {
      ring.init_barriers();
      tiles.init_barriers();
      for (auto& barrier : turn) barrier.init(1);
      for (auto& warp : dispatch_barriers)
        for (auto& full : warp.full) full.init(1);
    }
  };

  __device__ __forceinline__ static void fill(dg_mega_moe_schedule& schedule, const Params& params) {
    schedule.cluster = kCluster;
    schedule.band = Config::kBand;
    schedule.num_groups = params.num_local_experts;
    schedule.capacity_rows = params.capacity_rows;
    schedule.unit_rows = params.unit_rows;
    schedule.lag_tiles = params.lag_tiles;
  }
  __device__ __forceinline__ static int k_blocks(const dg_gemm_tile& tile) { return dg_k_blocks(&tile); }
  // What counts on gemm1 of a row block: every math warpgroup, once it has written its part of a tile.
  __device__ __forceinline__ static unsigned gemm1_writers(const Params& params) {
    return static_cast<unsigned>(dg_ceil_div(params.n, kBlockN / 2)) * kReaders;
  }
  // Counter `kind` (DG_READY_*) of a row block, or of a round.
  __device__ __forceinline__ static unsigned* ready(const Params& params, int kind, int i) {
    return pointer<unsigned>(params.ready) + kind * params.num_blocks + i;
  }
  __device__ __forceinline__ static void leave_round(const Params& params, int round) {
    ptx::red_release_gpu_add_u32(ready(params, DG_READY_round_left, round), 1);
  }
  __device__ __forceinline__ static unsigned round_leavers() { return gridDim.x * (kMathWarpgroups + DG_DISPATCH_WARPS); }
};

template <class Config>
struct MegaMoeTraits : MegaMoeTiles<Config> {
  using Tiles = MegaMoeTiles<Config>;
  using Swiglu = SwigluEpilogue<Config>;
  using Push = PushEpilogue<Config>;

  struct SharedStorage : Tiles::Common {
    typename Tiles::Ring::Tiles operands;
    typename Push::Storage staging[Tiles::kMathWarpgroups];
    DispatchStorage dispatch[DG_DISPATCH_WARPS];
  };
  static_assert(sizeof(SharedStorage) == dg_mega_moe_forward_smem_bytes(Tiles::kBlockN, Tiles::kStages));

  __device__ __forceinline__ static void fill(dg_mega_moe_schedule& schedule, const typename Config::Params& params) {
    Tiles::fill(schedule, params);
    dg_mega_moe_forward_steps(&schedule, params.n, params.hidden, Tiles::kBlockN);
  }
};

// The math warpgroups take turns with one staging, which leaves room for z of several steps of dSwiGLU.
template <class Config>
struct MegaMoeBackwardTraits : MegaMoeTiles<Config> {
  using Tiles = MegaMoeTiles<Config>;
  // StoreEpilogue's view of Config: a weight gradient.
  struct Store : Config {
    static constexpr int kKind = DG_GEMM_K_ENDS;
    static constexpr bool kAligned = true;
  };
  using Recompute = SwigluEpilogue<Config, false>;
  using Dswiglu = DswigluEpilogue<Config>;
  using Push = PushEpilogue<Config>;
  using Wgrad = StoreEpilogue<Store, TargetOf<WgradTarget>>;
  using DgradOperands = StepOperands<Config, Major::kK, Major::kMN>;
  using WgradOperands = StepOperands<Config, Major::kMN, Major::kMN>;

  union Staging {
    typename Dswiglu::Storage dswiglu;
    typename Push::Storage push;
    typename Wgrad::Storage wgrad;
  };
  static_assert(sizeof(Staging) == DG_BACKWARD_STAGING_BOXES * DG_GEMM_BOX_BYTES);
  // staged[w], count 1: the other warpgroup is done with the staging of its tile. Waited on by warpgroup w, like `turn`.
  struct SharedStorage : Tiles::Common {
    cutlass::arch::ClusterBarrier staged[Tiles::kMathWarpgroups];
    DswigluState dswiglu;
    typename Tiles::Ring::Tiles operands;
    Staging staging;
    DispatchStorage dispatch[DG_DISPATCH_WARPS];

    __device__ __forceinline__ void init_barriers() {
      Tiles::Common::init_barriers();
      for (auto& barrier : staged) barrier.init(1);
      dswiglu.init_barriers();
    }
  };
  static_assert(sizeof(SharedStorage) == dg_mega_moe_backward_smem_bytes(Tiles::kBlockN, Tiles::kStages));

  __device__ __forceinline__ static void fill(dg_mega_moe_schedule& schedule, const typename Config::Params& params) {
    Tiles::fill(schedule, params);
    const dg_mega_moe_wanted wanted = {params.wants_dx, params.wants_dw2, params.wants_dw13};
    dg_mega_moe_backward_steps(&schedule, params.n, params.hidden, Tiles::kBlockN, wanted, params.saved_rounds, params.accumulate);
  }
  __device__ __forceinline__ static unsigned dp_tiles(const typename Config::Params& params) {
    return static_cast<unsigned>(dg_mega_moe_dp_tiles(params.n));
  }
};

}  // namespace kernels
}  // namespace deep_gemm
