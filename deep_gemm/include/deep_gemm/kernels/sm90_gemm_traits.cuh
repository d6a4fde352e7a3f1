// What the roles of the BF16 GEMM share: sizes, tiles, shared memory.
#pragma once
#include <deep_gemm/epilogue/gated.cuh>
#include <deep_gemm/epilogue/store.cuh>
#include <deep_gemm/layout/gemm_params.h>
#include <deep_gemm/mainloop/sm90_operand_ring.cuh>
#include <deep_gemm/schedule/tile_ring.cuh>

namespace deep_gemm::kernels {

template <class Config, int kEpilogue> struct EpilogueOf { using Type = StoreEpilogue<Config>; };
template <class Config> struct EpilogueOf<Config, DG_EPILOGUE_SWIGLU> { using Type = SwigluEpilogue<Config>; };
template <class Config> struct EpilogueOf<Config, DG_EPILOGUE_DSWIGLU> { using Type = DswigluEpilogue<Config>; };

template <class Config>
struct GemmTraits {
  using Params = typename Config::Params;
  using Epilogue = typename EpilogueOf<Config, Config::kEpilogue>::Type;
  // SwiGLU: a tile's kBlockN columns are gate and up of half as many columns of the result.
  static constexpr bool kGateUp = Config::kEpilogue == DG_EPILOGUE_SWIGLU, kDswiglu = Config::kEpilogue == DG_EPILOGUE_DSWIGLU;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kBlockK = Config::kBlockK, kStages = Config::kNumStages;
  static constexpr bool kPingPong = Config::kPingPong;
  static constexpr int kCluster = Config::kCluster;
  static constexpr int kMathWarpgroups = 2, kMathThreads = kMathWarpgroups * 128, kThreads = kMathThreads + 128;
  static constexpr int kReaders = kPingPong ? 1 : kMathWarpgroups;    // warpgroups that work on one tile
  static constexpr int kAtoms = kBlockM / kWgmmaM / kReaders;         // blocks of 64 rows that a warpgroup has of a tile
  static constexpr int kLoadRegisters = 40, kMathRegisters = 232;
  // More than the CTA was given, and the math warpgroups would wait for them for ever.
  static_assert(128 * kLoadRegisters + kMathThreads * kMathRegisters <= 65536 / kThreads / 8 * 8 * kThreads);
  static constexpr Major kMajorA = Config::kAMajorK ? Major::kK : Major::kMN, kMajorB = Config::kBMajorK ? Major::kK : Major::kMN;
  static constexpr bool kKGrouped = Config::kKind == DG_GEMM_K_ENDS;
  static constexpr bool kGatherA = Config::kGather == DG_GATHER_A, kGatherB = Config::kGather == DG_GATHER_B;
  static constexpr int kGatherWarps = kGatherA || kGatherB ? 2 : 0;
  static_assert(kGatherWarps == 0 || kCluster == 1, "a gathered tile cannot be multicast");
  using TileA = OperandTile<kMajorA, kBlockM, kBlockK>;
  using TileB = OperandTile<kMajorB, kBlockN, kBlockK>;
  using Ring = OperandRing<TileA, TileB, kStages, kReaders, kCluster, 32 * kGatherWarps>;
  static constexpr uint32_t kTmaBytes = (kGatherA ? 0 : TileA::kBytes) + (kGatherB ? 0 : TileB::kBytes);  // of a stage
  using Acc = Accumulator<kBlockN>;
  static_assert(kAtoms * Acc::kRegisters <= 192, "the accumulator leaves 40 registers to everything else");
  static_assert(!kKGrouped || (kMajorA == Major::kMN && kMajorB == Major::kMN), "a k-group is masked by rows of MN-major tiles");

  using TileQueue = TileRing<dg_gemm_tile, 1 + kGatherWarps + kMathThreads / 32>;  // read by the warps that load and every math warp

  struct SharedStorage {
    typename Ring::Tiles operands;
    typename Epilogue::Storage staging[kMathWarpgroups];
    typename Ring::Barriers ring;
    TileQueue tiles;
    cutlass::arch::ClusterBarrier turn[kMathWarpgroups];
    DswigluState dswiglu[kMathWarpgroups];
  };
  static_assert(sizeof(SharedStorage) == dg_gemm_smem_bytes(kBlockM, kBlockN, kBlockK, kStages, Config::kStagingBoxes));

  __device__ __forceinline__ static dg_gemm_problem problem(const Params& params) {
    return {Config::kKind, kBlockM, kGateUp ? kBlockN / 2 : kBlockN, kCluster, Config::kBand, params.m, params.n, params.k, params.num_groups,
            params.window_begin, params.window_end, params.alignment, !params.accumulate};
  }
  // At least one: an empty k-group multiplies one block that is masked to zero, so that every tile runs the same code.
  __device__ __forceinline__ static int k_blocks(const dg_gemm_tile& tile) { return dg_max(1, (tile.k_end - tile.k_begin + kBlockK - 1) / kBlockK); }
};

}  // namespace deep_gemm::kernels
