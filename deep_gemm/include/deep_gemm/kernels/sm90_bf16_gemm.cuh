// D = A * B^T (+ D) on Hopper: BF16 operands, FP32 accumulation, D BF16 or FP32; dense, m-grouped and k-grouped (schedule/gemm_tiles.h).
// Persistent: one CTA per SM replays the static tile order. Two math warpgroups, one warp that loads, one that walks the tile order. Cooperative: both work on one tile, 64 rows each.
// Ping-pong: each takes every other tile whole, so that one's epilogue runs beside the other's mainloop.
//
// The CTAs of a cluster share one operand tile by multicast.
//
// Config: Params (GemmParams or GemmGatedParams), kEpilogue (DG_EPILOGUE_*), kKind (DG_GEMM_*), kPingPong, kCluster (1 or 2), kBand (row blocks that sweep the columns together), kBlockM, kBlockN, kBlockK, kNumStages, kStagingBoxes, kAMajorK, kBMajorK (false: MN-major),
// D (element of the result).
// Barriers: mainloop/sm90_operand_ring.cuh, schedule/tile_ring.cuh; turn[w] (ping-pong, count 1): the other math warpgroup has seen the last
// stage of its tile full, and warpgroup w may wait for the first of its own. Earlier, a stage could be two phases behind what w waits for, which
// a parity cannot tell from done. Named barrier 1 (cooperative, all math threads): the k-tail of a k-group has been zeroed in shared
// memory; 2 and 3 (one math warpgroup): the same for ping-pong, and epilogue/store.cuh.
// Cluster barrier: mbarriers are initialised before a peer uses them, and live until the last peer has.
#pragma once
#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/cluster_sm90.hpp>
#include <deep_gemm/epilogue/gated.cuh>
#include <deep_gemm/epilogue/store.cuh>
#include <deep_gemm/layout/gemm_params.h>
#include <deep_gemm/mainloop/sm90_operand_ring.cuh>
#include <deep_gemm/ptx/fence.cuh>
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
  using TileA = OperandTile<kMajorA, kBlockM, kBlockK>;
  using TileB = OperandTile<kMajorB, kBlockN, kBlockK>;
  using Ring = OperandRing<TileA, TileB, kStages, kReaders, kCluster>;
  using Acc = Accumulator<kBlockN>;
  static_assert(kAtoms * Acc::kRegisters <= 192, "the accumulator leaves 40 registers to everything else");
  static_assert(!kKGrouped || (kMajorA == Major::kMN && kMajorB == Major::kMN), "a k-group is masked by rows of MN-major tiles");

  using TileQueue = TileRing<1 + kMathThreads / 32>;  // read by the load warp and every math warp

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
    return {Config::kKind, kBlockM, kGateUp ? kBlockN / 2 : kBlockN, kCluster, Config::kBand, params.m, params.n, params.k, params.num_groups, params.window_begin,
            params.window_end, params.alignment, !params.accumulate};
  }
  // At least one: an empty k-group multiplies one block that is masked to zero, so that every tile runs the same code.
  __device__ __forceinline__ static int k_blocks(const dg_gemm_tile& tile) { return dg_max(1, (tile.k_end - tile.k_begin + kBlockK - 1) / kBlockK); }
};

// One warp, one elected thread of which issues: fills the ring with the operand tiles of every k block of every tile.
template <class Config>
struct LoadRole {
  using Traits = GemmTraits<Config>;
  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;

  __device__ __forceinline__ void run() {
    auto& ring = smem.ring;
    typename Traits::Ring::Position at;
    typename Traits::TileQueue::Reader tiles{smem.tiles};
    const int cta = Traits::kCluster == 1 ? 0 : cute::block_rank_in_cluster();
    for (const dg_gemm_tile* next; (next = tiles.next()); ) {
      const dg_gemm_tile tile = *next;
      // A row groups: only the masked kind has an A group of its own; B has one weight per group unless dense or k-grouped.
      const int group_a = Config::kKind == DG_GEMM_M_MASKED ? tile.group : 0;
      const int group_b = Config::kKind == DG_GEMM_DENSE || Traits::kKGrouped ? 0 : tile.group;
      for (int block = 0, k = tile.k_begin; block < Traits::k_blocks(tile); ++block, k += Traits::kBlockK, at.advance()) {
        ring.empty[at.stage].wait(at.phase ^ 1);
        if (!cute::elect_one_sync()) continue;
        auto* full = &ring.full[at.stage];
        full->arrive_and_expect_tx(Traits::Ring::kStageBytes);
        load_operand<Traits::kMajorA, Traits::kBlockM, Traits::kBlockK, Traits::kCluster>(
            &params.a, full, smem.operands.a[at.stage], tile.m_begin, k, group_a, tile.share == DG_GEMM_SHARE_A, cta);
        if constexpr (Traits::kGateUp) {
          load_gate_up<Traits::kMajorB, Traits::kBlockN, Traits::kBlockK, Traits::kCluster>(
              &params.b, &params.b_up, full, smem.operands.b[at.stage], tile.n_begin, k, group_b, tile.share == DG_GEMM_SHARE_B, cta);
        } else {
          load_operand<Traits::kMajorB, Traits::kBlockN, Traits::kBlockK, Traits::kCluster>(
              &params.b, full, smem.operands.b[at.stage], tile.n_begin, k, group_b, tile.share == DG_GEMM_SHARE_B, cta);
        }
      }
      tiles.release();
    }
  }
};

// One warpgroup of math.
template <class Config>
struct MathRole {
  using Traits = GemmTraits<Config>;
  using Acc = typename Traits::Acc;
  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;
  const int warpgroup;
  typename Traits::Ring::Position at{};

  __device__ __forceinline__ void run() {
    typename Traits::TileQueue::Reader tiles{smem.tiles};
    auto epilogue = make_epilogue();
    for (const dg_gemm_tile* tile; (tile = tiles.next());) {
      if (Traits::kPingPong && tiles.number % 2 != warpgroup) {
        at.advance(Traits::k_blocks(*tile));
      } else {
        Acc acc[Traits::kAtoms];
        epilogue.begin(*tile);
        if (Traits::kPingPong) begin_turn(tiles.number / 2);
        multiply(*tile, acc);
        epilogue.run(*tile, acc);
      }
      tiles.release();
    }
    epilogue.finish();
  }

  __device__ __forceinline__ typename Traits::Epilogue make_epilogue() const {
    const Warpgroup threads{2 + warpgroup};
    if constexpr (Traits::kDswiglu) return {params, smem.staging[warpgroup], first_row(), threads, smem.dswiglu[warpgroup]};
    else return {params, smem.staging[warpgroup], first_row(), threads};
  }

  // Warpgroup 0 begins: for it the phase before the first counts as done.
  __device__ __forceinline__ void begin_turn(int round) { smem.turn[warpgroup].wait((round ^ (warpgroup == 0)) & 1); }
  __device__ __forceinline__ void end_turn() {
    if (threadIdx.x % 128 == 0) smem.turn[warpgroup ^ 1].arrive();
  }

  // First row of the tile that is this warpgroup's.
  __device__ __forceinline__ int first_row() const { return Traits::kPingPong ? 0 : warpgroup * kWgmmaM; }

  // acc = sum over the tile's k blocks. What does not exist is left out: a second block of 64 rows, columns in steps of 64. Its accumulators
  // stay undefined, and the epilogue does not look at them. Loops of their own, as WGMMAs under a condition would be serialised.
  __device__ __forceinline__ void multiply(const dg_gemm_tile& tile, Acc (&acc)[Traits::kAtoms]) {
    constexpr int kAtoms = Traits::kAtoms, kN = Traits::kBlockN;
    const int columns = params.n - tile.n_begin;
    if (Traits::kCluster > 1 && tile.num_rows == 0) pass(tile);
    else if (Traits::kGateUp) tile.num_rows > kWgmmaM ? multiply_blocks<kAtoms, kN>(tile, acc) : multiply_blocks<1, kN>(tile, acc);
    else if (kN == 192 && columns <= 64) multiply_blocks<kAtoms, 64>(tile, acc);
    else if (kN == 192 && columns <= 128) multiply_blocks<kAtoms, 128>(tile, acc);
    else if (kAtoms == 1 || tile.num_rows > kWgmmaM) multiply_blocks<kAtoms, kN>(tile, acc);
    else multiply_blocks<1, kN>(tile, acc);
  }

  // This CTA has no tile, but its peer's tiles come through its ring.
  __device__ __forceinline__ void pass(const dg_gemm_tile& tile) {
    const int blocks = Traits::k_blocks(tile);
    for (int block = 0; block < blocks; ++block, at.advance()) {
      smem.ring.full[at.stage].wait(at.phase);
      if (Traits::kPingPong && block == blocks - 1) end_turn();
      release(at.stage);
    }
  }

  // Each stage goes back to the load role one block later, when its WGMMAs are done.
  template <int kActive, int kN>
  __device__ __forceinline__ void multiply_blocks(const dg_gemm_tile& tile, Acc (&acc)[Traits::kAtoms]) {
    auto& ring = smem.ring;
    int previous = -1;
    const int blocks = Traits::k_blocks(tile);
    for (int block = 0; block < blocks; ++block, at.advance()) {
      ring.full[at.stage].wait(at.phase);
      if (Traits::kPingPong && block == blocks - 1) end_turn();
      const int valid = tile.k_end - tile.k_begin - block * Traits::kBlockK;
      if (Traits::kKGrouped && valid < Traits::kBlockK) zero_k_tail(valid);
      fence<kActive>(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < kActive; ++i) multiply_block<kN>(acc[i], first_row() + i * kWgmmaM, block > 0);
      cute::warpgroup_commit_batch();
      fence<kActive>(acc);
      cute::warpgroup_wait<1>();
      release(previous);
      previous = at.stage;
    }
    cute::warpgroup_wait<0>();
    fence<kActive>(acc);
    release(previous);
  }

  template <int kActive>
  __device__ __forceinline__ static void fence(Acc (&acc)[Traits::kAtoms]) {
#pragma unroll
    for (int i = 0; i < kActive; ++i) acc[i].fence();
  }

  // 64 rows, the first kN columns of one k block.
  template <int kN>
  __device__ __forceinline__ void multiply_block(Acc& acc, int row, bool accumulate) {
#pragma unroll
    for (int kk = 0; kk < Traits::kBlockK; kk += kWgmmaK)
      acc.template mma<kN, Traits::TileA::kGmmaMajor, Traits::TileB::kGmmaMajor>(Traits::TileA::descriptor(smem.operands.a[at.stage], row, kk),
          Traits::TileB::descriptor(smem.operands.b[at.stage], 0, kk), accumulate || kk > 0);
  }

  __device__ __forceinline__ void release(int stage) {
    if (stage < 0) return;
    const int thread = threadIdx.x % 128;
    if constexpr (Traits::kCluster == 1) {
      if (thread == 0) smem.ring.empty[stage].arrive();
    } else if (thread < Traits::kCluster) {
      smem.ring.empty[stage].arrive(thread);  // thread i tells CTA i of the cluster
    }
  }

  // Rows of k at and past `valid` belong to the next group, or to nobody and may hold NaN: both operands' rows become zero. A row of k is
  // 128 contiguous bytes of each box; the swizzle permutes inside it.
  __device__ __forceinline__ void zero_k_tail(int valid) {
    constexpr int kBoxesA = Traits::kBlockM / kSwizzleElements, kBoxes = kBoxesA + Traits::kBlockN / kSwizzleElements, kChunks = kSwizzleBytes / 16;
    constexpr int kThreads = Traits::kReaders * 128;
    const int rows = Traits::kBlockK - valid;
    for (int i = threadIdx.x % kThreads; i < rows * kBoxes * kChunks; i += kThreads) {
      const int chunk = i % kChunks, row = valid + i / kChunks % rows, box = i / kChunks / rows;
      uint8_t* tile = box < kBoxesA ? smem.operands.a[at.stage] + box * Traits::TileA::kBoxBytes
                                    : smem.operands.b[at.stage] + (box - kBoxesA) * Traits::TileB::kBoxBytes;
      reinterpret_cast<uint4*>(tile + row * kSwizzleBytes)[chunk] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async_shared();  // WGMMA reads what ordinary stores wrote
    cutlass::arch::NamedBarrier::sync(kThreads, Traits::kPingPong ? 2 + warpgroup : 1);
  }
};

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
    if (warp == 1 && cute::elect_one_sync()) smem.tiles.run(Traits::problem(params), reinterpret_cast<const int*>(params.group_layout));
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
