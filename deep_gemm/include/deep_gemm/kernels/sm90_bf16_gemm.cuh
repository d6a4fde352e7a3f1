// D = A * B^T (+ D) on Hopper: BF16 operands, FP32 accumulation, D BF16 or FP32; dense, m-grouped and k-grouped (schedule/gemm_tiles.h).
// Persistent: one CTA per SM replays the static tile order. Two math warpgroups of 64 rows each, one load warp.
//
// Config: kKind (DG_GEMM_*), kBlockM, kBlockN, kBlockK, kNumStages, kMaxGroups, kAMajorK, kBMajorK (false: MN-major), D (element of the result).
// Barriers: mainloop/sm90_operand_ring.cuh. Named barrier 1 (all math threads): the k-tail of a k-group has been zeroed in shared memory; 2 and
// 3: epilogue/store.cuh.
#pragma once
#include <cutlass/arch/reg_reconfig.h>
#include <deep_gemm/epilogue/store.cuh>
#include <deep_gemm/layout/gemm_params.h>
#include <deep_gemm/mainloop/sm90_operand_ring.cuh>
#include <deep_gemm/ptx/fence.cuh>
#include <deep_gemm/schedule/gemm_tiles.h>

namespace deep_gemm::kernels {

template <class Config>
struct GemmTraits {
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kBlockK = Config::kBlockK, kStages = Config::kNumStages;
  static constexpr int kMathWarpgroups = kBlockM / kWgmmaM, kMathThreads = kMathWarpgroups * 128, kThreads = kMathThreads + 128;
  static constexpr int kLoadRegisters = 40, kMathRegisters = 232;
  static constexpr Major kMajorA = Config::kAMajorK ? Major::kK : Major::kMN, kMajorB = Config::kBMajorK ? Major::kK : Major::kMN;
  static constexpr bool kGroupTable = Config::kKind == DG_GEMM_M_ENDS || Config::kKind == DG_GEMM_M_MASKED || Config::kKind == DG_GEMM_K_ENDS;
  static constexpr bool kKGrouped = Config::kKind == DG_GEMM_K_ENDS;
  using TileA = OperandTile<kMajorA, kBlockM, kBlockK>;
  using TileB = OperandTile<kMajorB, kBlockN, kBlockK>;
  using Ring = OperandRing<TileA, TileB, kStages, kMathWarpgroups>;
  using Atom = typename WgmmaAtom<kBlockN, TileA::kGmmaMajor, TileB::kGmmaMajor>::Type;
  static_assert(kMathWarpgroups == 2, "register budgets are for two math warpgroups");
  static_assert(!kKGrouped || (kMajorA == Major::kMN && kMajorB == Major::kMN), "a k-group is masked by rows of MN-major tiles");

  struct SharedStorage {
    typename Ring::Storage ring;
    StoreStaging staging[kMathWarpgroups];
    alignas(1024) int group_table[Config::kMaxGroups];
  };
  static_assert(sizeof(SharedStorage) + 1024 == dg_gemm_smem_bytes(kBlockM, kBlockN, kBlockK, kStages, Config::kMaxGroups));

  __device__ __forceinline__ static dg_gemm_problem problem(const GemmParams& params) {
    return {Config::kKind, kBlockM, kBlockN, params.m, params.n, params.k, params.num_groups, params.window_begin, params.window_end,
            params.alignment, !params.accumulate};
  }
  // At least one: an empty k-group multiplies one block that is masked to zero, so that every tile runs the same code.
  __device__ __forceinline__ static int k_blocks(const dg_gemm_tile& tile) { return dg_max(1, (tile.k_end - tile.k_begin + kBlockK - 1) / kBlockK); }
  __device__ __forceinline__ static const int* layout(const GemmParams& params, const SharedStorage& smem) {
    return kGroupTable ? smem.group_table : reinterpret_cast<const int*>(params.group_layout);
  }
};

// The tiles of this CTA that have work, in order: `while (tiles.next(tile))`.
template <class Config>
struct Tiles {
  using Traits = GemmTraits<Config>;
  const dg_gemm_problem problem;
  const int* layout;
  dg_gemm_cursor cursor;

  __device__ Tiles(const GemmParams& params, const typename Traits::SharedStorage& smem)
      : problem(Traits::problem(params)), layout(Traits::layout(params, smem)), cursor(dg_gemm_cursor_begin(blockIdx.x, gridDim.x)) {}
  __device__ __forceinline__ bool next(dg_gemm_tile& tile) {
    do {
      if (!dg_gemm_next_tile(&cursor, &problem, layout, &tile)) return false;
    } while (tile.num_rows == 0);
    return true;
  }
};

// One thread: fills the ring with the operand tiles of every k block of every tile.
template <class Config>
struct LoadRole {
  using Traits = GemmTraits<Config>;
  const GemmParams& params;
  typename Traits::SharedStorage& smem;

  __device__ __forceinline__ void run() {
    auto& ring = smem.ring;
    typename Traits::Ring::Position at;
    Tiles<Config> tiles(params, smem);
    dg_gemm_tile tile;
    while (tiles.next(tile)) {
      // A row groups: only the masked kind has an A group of its own; B has one weight per group unless dense or k-grouped.
      const int group_a = Config::kKind == DG_GEMM_M_MASKED ? tile.group : 0;
      const int group_b = Config::kKind == DG_GEMM_DENSE || Traits::kKGrouped ? 0 : tile.group;
      for (int block = 0, k = tile.k_begin; block < Traits::k_blocks(tile); ++block, k += Traits::kBlockK, at.advance()) {
        ring.empty[at.stage].wait(at.phase ^ 1);
        ring.full[at.stage].arrive_and_expect_tx(Traits::Ring::kStageBytes);
        load_operand<Traits::kMajorA, Traits::kBlockM, Traits::kBlockK>(&params.a, &ring.full[at.stage], ring.a[at.stage], tile.m_begin, k, group_a);
        load_operand<Traits::kMajorB, Traits::kBlockN, Traits::kBlockK>(&params.b, &ring.full[at.stage], ring.b[at.stage], tile.n_begin, k, group_b);
      }
    }
  }
};

// One warpgroup of math: 64 rows of the tile.
template <class Config>
struct MathRole {
  using Traits = GemmTraits<Config>;
  const GemmParams& params;
  typename Traits::SharedStorage& smem;
  const int warpgroup;
  typename Traits::Ring::Position at{};

  __device__ __forceinline__ void run() {
    Tiles<Config> tiles(params, smem);
    const StoreEpilogue<Config> epilogue{params, smem.staging[warpgroup], warpgroup};
    dg_gemm_tile tile;
    while (tiles.next(tile)) {
      Accumulator<Traits::kBlockN> acc;
      multiply(tile, acc);
      epilogue.run(tile, acc);
    }
    epilogue.finish();
  }

  // acc = sum over the tile's k blocks; each stage goes back to the load role one block later, when its WGMMAs are done.
  __device__ __forceinline__ void multiply(const dg_gemm_tile& tile, Accumulator<Traits::kBlockN>& acc) {
    auto& ring = smem.ring;
    int previous = -1;
    for (int block = 0; block < Traits::k_blocks(tile); ++block, at.advance()) {
      ring.full[at.stage].wait(at.phase);
      const int valid = tile.k_end - tile.k_begin - block * Traits::kBlockK;
      if (Traits::kKGrouped && valid < Traits::kBlockK) zero_k_tail(valid);
      acc.fence();
      cute::warpgroup_arrive();
#pragma unroll
      for (int kk = 0; kk < Traits::kBlockK; kk += kWgmmaK)
        acc.template mma<typename Traits::Atom>(Traits::TileA::descriptor(ring.a[at.stage], warpgroup * kWgmmaM, kk),
                                                Traits::TileB::descriptor(ring.b[at.stage], 0, kk), block > 0 || kk > 0);
      cute::warpgroup_commit_batch();
      acc.fence();
      cute::warpgroup_wait<1>();
      release(previous);
      previous = at.stage;
    }
    cute::warpgroup_wait<0>();
    acc.fence();
    release(previous);
  }

  __device__ __forceinline__ void release(int stage) {
    if (stage >= 0 && threadIdx.x % 128 == 0) smem.ring.empty[stage].arrive();
  }

  // Rows of k at and past `valid` belong to the next group, or to nobody and may hold NaN: both operands' rows become zero. A row of k is
  // 128 contiguous bytes of each box; the swizzle permutes inside it.
  __device__ __forceinline__ void zero_k_tail(int valid) {
    constexpr int kBoxesA = Traits::kBlockM / kSwizzleElements, kBoxes = kBoxesA + Traits::kBlockN / kSwizzleElements, kChunks = kSwizzleBytes / 16;
    const int rows = Traits::kBlockK - valid;
    for (int i = threadIdx.x; i < rows * kBoxes * kChunks; i += Traits::kMathThreads) {
      const int chunk = i % kChunks, row = valid + i / kChunks % rows, box = i / kChunks / rows;
      uint8_t* tile = box < kBoxesA ? smem.ring.a[at.stage] + box * Traits::TileA::kBoxBytes
                                    : smem.ring.b[at.stage] + (box - kBoxesA) * Traits::TileB::kBoxBytes;
      reinterpret_cast<uint4*>(tile + row * kSwizzleBytes)[chunk] = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_proxy_async_shared();  // WGMMA reads what ordinary stores wrote
    cutlass::arch::NamedBarrier::sync(Traits::kMathThreads, 1);
  }
};

template <class Config>
__device__ __forceinline__ void sm90_bf16_gemm(const GemmParams& params) {
  using Traits = GemmTraits<Config>;
  extern __shared__ uint8_t raw[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) smem.ring.init_barriers();
  if constexpr (Traits::kGroupTable)
    for (int g = threadIdx.x; g < params.num_groups; g += Traits::kThreads) smem.group_table[g] = reinterpret_cast<const int*>(params.group_layout)[g];
  __syncthreads();

  const int warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == Traits::kMathWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kLoadRegisters>();
    if (threadIdx.x == Traits::kMathThreads) LoadRole<Config>{params, smem}.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kMathRegisters>();
    MathRole<Config>{params, smem, warpgroup}.run();
  }
}

}  // namespace deep_gemm::kernels
