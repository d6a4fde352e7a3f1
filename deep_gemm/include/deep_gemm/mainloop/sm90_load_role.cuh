// The roles that fill the operand ring.
#pragma once
#include <cute/arch/cluster_sm90.hpp>
#include <deep_gemm/kernels/sm90_gemm_traits.cuh>
#include <deep_gemm/ptx/async_copy.cuh>

namespace deep_gemm::kernels {

// One warp, one elected thread of which issues: fills the ring, by TMA, with the operand tiles of every k block of every tile.
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
        full->arrive_and_expect_tx(Traits::kTmaBytes);
        if constexpr (!Traits::kGatherA)
          load_operand<Traits::kMajorA, Traits::kBlockM, Traits::kBlockK, Traits::kCluster>(
              &params.a, full, smem.operands.a[at.stage], tile.m_begin, k, group_a, tile.share == DG_GEMM_SHARE_A, cta);
        if constexpr (Traits::kGateUp) {
          load_gate_up<Traits::kMajorB, Traits::kBlockN, Traits::kBlockK, Traits::kCluster>(
              &params.b, &params.b_up, full, smem.operands.b[at.stage], tile.n_begin, k, group_b, tile.share == DG_GEMM_SHARE_B, cta);
        } else if constexpr (!Traits::kGatherB) {
          load_operand<Traits::kMajorB, Traits::kBlockN, Traits::kBlockK, Traits::kCluster>(
              &params.b, full, smem.operands.b[at.stage], tile.n_begin, k, group_b, tile.share == DG_GEMM_SHARE_B, cta);
        }
      }
      tiles.release();
    }
  }
};

// kGatherWarps warps: the tiles of an operand whose rows are listed (params.gather_rows) and lie anywhere. TMA cannot gather on this architecture, so
// every thread copies 16-byte chunks to where TMA would have put them. A row is one row of A, or, in a k-group, one index of the contraction.
template <class Config>
struct GatherRole {
  using Traits = GemmTraits<Config>;
  static constexpr bool kA = Traits::kGatherA, kRowsAreK = Traits::kKGrouped;
  static constexpr int kBlockMN = kA ? Traits::kBlockM : Traits::kBlockN, kThreads = 32 * Traits::kGatherWarps;
  static constexpr int kRows = kRowsAreK ? Traits::kBlockK : kBlockMN, kBoxes = kRowsAreK ? kBlockMN / kSwizzleElements : 1;
  static constexpr int kBoxBytes = kSwizzleBytes * Traits::kBlockK;
  static constexpr int kLag = 2;  // stages whose copies may be under way while the next is begun
  static_assert(kLag < Traits::kStages && (kA ? Traits::kMajorA : Traits::kMajorB) == (kRowsAreK ? Major::kMN : Major::kK));

  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;
  const int thread;  // of kThreads

  __device__ __forceinline__ void run() {
    typename Traits::Ring::Position at, landed;
    typename Traits::TileQueue::Reader tiles{smem.tiles};
    int under_way = 0;
    for (const dg_gemm_tile* tile; (tile = tiles.next());) {
      const int blocks = Traits::k_blocks(*tile);
#pragma unroll 1
      for (int block = 0; block < blocks; ++block, at.advance()) {
        smem.ring.empty[at.stage].wait(at.phase ^ 1);
        copy(*tile, tile->k_begin + block * Traits::kBlockK, kA ? smem.operands.a[at.stage] : smem.operands.b[at.stage]);
        ptx::cp_async_commit();
        if (under_way < kLag) {
          ++under_way;
        } else {
          ptx::cp_async_wait<kLag>();
          tell(landed);
        }
      }
      tiles.release();
    }
    ptx::cp_async_wait<0>();
    for (; under_way > 0; --under_way) tell(landed);
  }

 private:
  // This warp's copies into the next stage in order have landed, and WGMMA may read them.
  __device__ __forceinline__ void tell(typename Traits::Ring::Position& landed) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (thread % 32 == 0) smem.ring.full[landed.stage].arrive();
    landed.advance();
  }

  // Eight threads copy 128 bytes of a row. A thread keeps its place among eight rows, so that its place in shared memory only moves by constants.
  __device__ __forceinline__ void copy(const dg_gemm_tile& tile, int k, uint8_t* to) const {
    constexpr int kStep = kThreads / 8;
    static_assert(kStep == 8, "rows of a swizzle atom");
    const int place = thread / 8, chunk = thread % 8;
    const int rows = (kRowsAreK ? tile.k_end - k : tile.num_rows) - place;
    const int column = 8 * chunk + (kRowsAreK ? (kA ? tile.m_begin : tile.n_begin) : k);
    const int columns = (kRowsAreK ? (kA ? params.m : params.n) : params.k) - column;
    const int* list = reinterpret_cast<const int*>(params.gather_rows) + (kRowsAreK ? k : tile.m_begin) + place;
    const auto* from = reinterpret_cast<const __nv_bfloat16*>(params.gather_source) + column;
    const uint32_t base = cute::cast_smem_ptr_to_uint(to) + box_offset<kSwizzleBytes>(place, chunk);
#pragma unroll kRowsAreK ? 2 : 4
    for (int row = 0; row < kRows; row += kStep) {
      const int source = row < rows ? __ldg(list + row) : -1;
      const auto* at = from + (source < 0 ? 0 : source * params.gather_stride);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        ptx::cp_async_16(base + box * kBoxBytes + row * kSwizzleBytes, at + box * kSwizzleElements,
                         source >= 0 && box * kSwizzleElements < columns ? 16 : 0);
    }
  }
};

}  // namespace deep_gemm::kernels
