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
    for (; tiles.next(); tiles.release()) {
      const dg_gemm_tile tile = tiles.tile();
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
    }
  }
};

// kGatherWarps warps: the tiles of an operand whose rows are listed (params.gather_rows) and lie anywhere. TMA cannot gather on this architecture, so
// every thread copies 16-byte chunks to where TMA would have put them. A row is one row of A, or, in a k-group, one index of the contraction.
// Eight threads copy 128 bytes of a row; a thread keeps its place among eight rows, so that its place in shared memory moves by constants only.
template <class Config>
struct GatherRole {
  using Traits = GemmTraits<Config>;
  static constexpr bool kA = Traits::kGatherA, kRowsAreK = Traits::kKGrouped;
  static constexpr int kBlockMN = kA ? Traits::kBlockM : Traits::kBlockN, kRowStep = 32 * Traits::kGatherWarps / 8;
  static constexpr int kRows = (kRowsAreK ? Traits::kBlockK : kBlockMN) / kRowStep, kBoxes = kRowsAreK ? kBlockMN / kSwizzleElements : 1;
  static_assert(kRowStep == 8, "rows of a swizzle atom");
  static_assert((kA ? Traits::kMajorA : Traits::kMajorB) == (kRowsAreK ? Major::kMN : Major::kK));

  const typename Traits::Params& params;
  typename Traits::SharedStorage& smem;

  // This thread's rows, of a tile or of a k block: where they begin, in units of 16 bytes; kZeros where there is none.
  static constexpr uint32_t kZeros = ~0u;
  struct Rows {
    uint32_t begin[kRows];
  };

  __device__ __forceinline__ void run() {
    typename Traits::Ring::Position at;
    typename Traits::TileQueue::Reader tiles{smem.tiles};
    for (; tiles.next(); tiles.release()) {
      const dg_gemm_tile& tile = tiles.tile();
      const int blocks = Traits::k_blocks(tile);
      Rows rows;
      if constexpr (!kRowsAreK) find(tile.m_begin, tile.num_rows, rows);
#pragma unroll 1
      for (int block = 0; block < blocks; ++block, at.advance()) {
        const int k = tile.k_begin + block * Traits::kBlockK;
        if constexpr (kRowsAreK) find(k, tile.k_end - k, rows);
        smem.ring.empty[at.stage].wait(at.phase ^ 1);
        if constexpr (kRowsAreK) copy(rows, kA ? tile.m_begin : tile.n_begin, kA ? params.m : params.n, at.stage);
        else copy(rows, k, params.k, at.stage);
        ptx::cp_async_arrive(cute::cast_smem_ptr_to_uint(&smem.ring.full[at.stage]));
      }
    }
  }

 private:
  // The rows listed from `first` on, of which `count` belong to the tile.
  __device__ __forceinline__ void find(int first, int count, Rows& rows) const {
    const int place = threadIdx.x % 64 / 8;
    const int* list = reinterpret_cast<const int*>(params.gather_rows) + first + place;
    const uint32_t stride = static_cast<uint32_t>(params.gather_stride) / 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int source = place + i * kRowStep < count ? __ldg(list + i * kRowStep) : -1;
      rows.begin[i] = source < 0 ? kZeros : source * stride;
      ptx::forget(rows.begin[i]);  // or the compiler keeps the row numbers too, to tell which exist
    }
  }

  // 16 bytes of the 128 from column `first` on, and of every further box, of each row.
  __device__ __forceinline__ void copy(const Rows& rows, int first, int num_columns, int stage) const {
    const int thread = ptx::thread_index_anew() % 64, column = first + 8 * (thread % 8);
    const uint8_t* tile = kA ? smem.operands.a[stage] : smem.operands.b[stage];
    const uint32_t to = cute::cast_smem_ptr_to_uint(tile) + box_offset<kSwizzleBytes>(thread / 8, thread % 8);
    const auto* from = reinterpret_cast<const uint4*>(params.gather_source) + column / 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      uint32_t begin = rows.begin[i];
      ptx::forget(begin);  // or it keeps 64-bit addresses of all rows across k blocks
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const bool exists = begin != kZeros && column + box * kSwizzleElements < num_columns;
        ptx::cp_async_16(to + box * (kSwizzleBytes * Traits::kBlockK) + i * kRowStep * kSwizzleBytes,
                         from + begin + box * (kSwizzleElements / 8), exists ? 16 : 0);
      }
    }
  }
};

}  // namespace deep_gemm::kernels
