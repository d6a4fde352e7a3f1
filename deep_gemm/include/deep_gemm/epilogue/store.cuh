// Plain GEMM epilogue: D = acc, or D += acc in FP32; rows and columns outside the result are not touched.
//
// Whole: 64 rows go through the warpgroup's staging boxes of 128 bytes per row, in turn, and leave as TMA stores (or, for FP32 D, TMA
// reductions) that run beside the next tile's mainloop. Masked: where TMA cannot leave rows out (partial groups), or where BF16 D or a carry
// must be read first, each warp stages 32 FP32 columns at a time and every lane stores 8 neighbours.
#pragma once
#include <deep_gemm/epilogue/staging.cuh>
#include <deep_gemm/epilogue/vector.cuh>
#include <deep_gemm/layout/gemm_params.h>
#include <deep_gemm/schedule/gemm_tiles.h>

namespace deep_gemm {

// The argument of a GEMM, or any with fields of the same names.
template <class Params>
struct OneTarget {
  const Params& params;
  __device__ __forceinline__ const Params& operator*() const { return params; }
};
// One of several in a row. Its address is computed whenever it is used: it is not worth registers.
template <class Params>
struct TargetOf {
  const Params* first;
  const int index;
  __device__ __forceinline__ const Params& operator*() const {
    int i = index;
    ptx::forget(i);
    return first[i];
  }
};

template <class Config, class Target = OneTarget<GemmParams>>
struct StoreEpilogue {
  using D = typename Config::D;
  static constexpr bool kGroupOwnsRows = Config::kKind == DG_GEMM_M_MASKED || Config::kKind == DG_GEMM_K_ENDS;
  static constexpr bool kTmaLeavesOutRows = Config::kKind == DG_GEMM_DENSE || Config::kKind == DG_GEMM_K_ENDS;  // the map ends where the rows end
  // FP32 D holds the partial sums of a group that windows cut; BF16 D leaves them to carry_in and carry_out.
  static constexpr bool kFloat = sizeof(D) == 4, kCarry = Config::kKind == DG_GEMM_K_ENDS && !kFloat;
  static constexpr int kBoxColumns = kSwizzleBytes / sizeof(D), kBoxes = Config::kBlockN / kBoxColumns;
  static constexpr int kStagingBoxes = Config::kStagingBoxes;
  static constexpr bool kAligned = requires { Config::kAligned; };  // rows of D begin at multiples of 16 bytes and are multiples of 8 columns
  static constexpr int kColumns = 32, kRows = kWgmmaM / 4, kLanesPerRow = kColumns / 8;
  using Acc = Accumulator<Config::kBlockN>;

  union Storage {
    alignas(1024) uint8_t box[kStagingBoxes][kWgmmaM * kSwizzleBytes];  // whole: 128-byte-swizzled rows, as TMA reads them
    float rows[4][kWgmmaM / 4][32];                                     // masked: 16 rows of 32 columns per warp
    static_assert(sizeof(box) == kStagingBoxes * DG_GEMM_BOX_BYTES);
  };

  const Target target;
  Storage& storage;
  const int first_row;  // of the tile that is this warpgroup's
  const Warpgroup warpgroup;
  const bool swap_carries = false;  // in odd rounds of a fused launch

  __device__ __forceinline__ void begin(const dg_gemm_tile&) const {}

  template <int kAtoms>
  __device__ __forceinline__ void run(const dg_gemm_tile& tile, const Acc (&acc)[kAtoms]) const {
#pragma unroll
    for (int i = 0; i < kAtoms; ++i) run_block(tile, first_row + i * kWgmmaM, acc[i]);
  }

  // Before the CTA ends: TMA has read the last boxes.
  __device__ __forceinline__ void finish() const {
    if (Warpgroup::leader()) cute::tma_store_wait<0>();
  }

 private:
  // 64 rows, the first of which is row `row` of the tile.
  __device__ __forceinline__ void run_block(const dg_gemm_tile& tile, int row, const Acc& acc) const {
    if (row >= tile.num_rows) return;
    if (is_whole(tile, row + kWgmmaM - 1)) {
      store_boxes(tile, row, acc, ::cuda::std::make_index_sequence<kBoxes>{});
    } else {
      warpgroup.template wait_until_read<0>();
      store_chunks(tile, row, acc, ::cuda::std::make_index_sequence<Config::kBlockN / kColumns>{});
      warpgroup.sync();  // each warp went its own way; none may fall behind the others' barriers
    }
  }

  __device__ __forceinline__ bool is_whole(const dg_gemm_tile& tile, int last) const {
    if (!(*target).d_has_map || (!kFloat && (*target).accumulate) || (kCarry && (tile.carry_in || tile.carry_out))) return false;
    if (kTmaLeavesOutRows) return true;
    return last < tile.num_rows && row_has_group(tile.m_begin + last);
  }

  // ---- whole -----------------------------------------------------------------------------------------------------------------------

  // A pack, not a loop: the compiler gives up unrolling 8 steps, and the accumulator would move to local memory.
  template <size_t... kBox>
  __device__ __forceinline__ void store_boxes(const dg_gemm_tile& tile, int row, const Acc& acc, ::cuda::std::index_sequence<kBox...>) const {
    (store_box<kBox>(tile, row, acc), ...);
  }

  template <int kBox>
  __device__ __forceinline__ void store_box(const dg_gemm_tile& tile, int row, const Acc& acc) const {
    const int column = tile.n_begin + kBox * kBoxColumns;
    if (column >= (*target).n) return;
    uint8_t* box = storage.box[kBox % kStagingBoxes];
    // Boxes take turns inside 64 rows, which may end on any: their first box waits for all, the others for all but the latest stores.
    warpgroup.template wait_until_read<kBox == 0 ? 0 : kStagingBoxes - 1>();
    stage_box<kBox>(box, acc);
    warpgroup.sync_for_tma();
    if (Warpgroup::leader()) {
      const int group = kGroupOwnsRows ? tile.group : 0;
      if ((*target).accumulate || tile.carry_in) cute::SM90_TMA_REDUCE_ADD_3D::copy(&(*target).d_map, box, column, tile.m_begin + row, group);
      else cute::SM90_TMA_STORE_3D::copy(&(*target).d_map, box, column, tile.m_begin + row, group);
      cute::tma_store_arrive();
    }
  }

  template <int kBox>
  __device__ __forceinline__ static void stage_box(uint8_t* box, const Acc& acc) {
    const int thread = ptx::thread_index_anew() % 128, quad = thread % 4;
#pragma unroll
    for (int j = 0; j < kBoxColumns / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int reg = 4 * (kBox * kBoxColumns / 8 + j) + 2 * half, row = Acc::row(thread, half);
        if constexpr (kFloat) {
          float2* to = reinterpret_cast<float2*>(box + box_offset<kSwizzleBytes>(row, 2 * j + quad / 2) + quad % 2 * 8);
          *to = make_float2(acc.value[reg], acc.value[reg + 1]);
        } else {
          auto* to = reinterpret_cast<__nv_bfloat162*>(box + box_offset<kSwizzleBytes>(row, j) + quad * 4);
          *to = __floats2bfloat162_rn(acc.value[reg], acc.value[reg + 1]);
        }
      }
  }

  // ---- masked ----------------------------------------------------------------------------------------------------------------------

  template <size_t... kChunk>
  __device__ __forceinline__ void store_chunks(const dg_gemm_tile& tile, int row, const Acc& acc, ::cuda::std::index_sequence<kChunk...>) const {
    (store_chunk<kChunk>(tile, row, acc), ...);
  }

  template <int kChunk>
  __device__ __forceinline__ void store_chunk(const dg_gemm_tile& tile, int row, const Acc& acc) const {
    const int thread = ptx::thread_index_anew() % 128, warp = thread / 32, lane = thread % 32;
    auto& rows = storage.rows[warp];
    __syncwarp();  // the previous chunk has been read
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int reg = 4 * (kChunk * kColumns / 8 + j) + 2 * half;
        float* to = rows[Acc::row(lane, half)] + chunk_offset(Acc::row(lane, half), j) + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(acc.value[reg], acc.value[reg + 1]);
      }
    __syncwarp();
    store_rows(tile, row + warp * kRows, rows, kChunk * kColumns, lane);
  }

  // Where a staged row has its columns 8c to 8c + 7: the four rows that a half-warp writes lie in different banks.
  __device__ __forceinline__ static int chunk_offset(int row, int c) { return (c ^ row % 4) * 8; }

  __device__ __forceinline__ void store_rows(const dg_gemm_tile& tile, int first, const float (&rows)[kRows][32], int first_column, int lane) const {
    const int column = lane % kLanesPerRow * 8, left = (*target).n - tile.n_begin - first_column - column;
    const bool aligned = kAligned || (((*target).n | (*target).ldd | (*target).d_group_stride) % 8 == 0 && (*target).d % 16 == 0);
#pragma unroll 1
    for (int r = lane / kLanesPerRow; r < kRows; r += 32 / kLanesPerRow) {
      const int row = first + r;
      if (row >= tile.num_rows || left <= 0 || !row_has_group(tile.m_begin + row)) continue;
      const Row out = row_of(tile, row, first_column + column);
      const float* value = rows[r] + chunk_offset(r, column / 8);
      if (aligned) {
        store_eight(out, load8(value));
      } else {
        for (int i = 0; i < dg_min(left, 8); ++i) store_one(out, i, value[i]);
      }
    }
  }

  // Where columns of one row of the result go: to D, or to the carry when the group goes on in a later window.
  struct Row {
    dg_i64 d, carry;  // places in D, and in both carries
    bool add_d, add_carry, to_carry;
  };
  __device__ __forceinline__ Row row_of(const dg_gemm_tile& tile, int row, int column) const {
    const dg_i64 m = tile.m_begin + row, n = tile.n_begin + column, group = kGroupOwnsRows ? tile.group : 0;
    const bool to_carry = kCarry && tile.carry_out && (*target).carry_out;
    return {group * (*target).d_group_stride + m * (*target).ldd + n, m * (*target).n + n,
            (*target).accumulate ? !to_carry : !kCarry && tile.carry_in, kCarry && tile.carry_in, to_carry};
  }
  __device__ __forceinline__ D* result(const Row& row) const { return reinterpret_cast<D*>((*target).d) + row.d; }
  __device__ __forceinline__ float* carry_in(const Row& row) const {
    return reinterpret_cast<float*>(swap_carries ? (*target).carry_out : (*target).carry_in) + row.carry;
  }
  __device__ __forceinline__ float* carry_out(const Row& row) const {
    return reinterpret_cast<float*>(swap_carries ? (*target).carry_in : (*target).carry_out) + row.carry;
  }
  __device__ __forceinline__ void store_eight(const Row& row, F32x8 v) const {
    if (kCarry && row.add_carry) add8(v, load8(carry_in(row)));
    if (row.add_d) add8(v, load8(result(row)));
    if (kCarry && row.to_carry) store8(carry_out(row), v); else store8(result(row), v);
  }
  __device__ __forceinline__ void store_one(const Row& row, int i, float v) const {
    if (kCarry && row.add_carry) v += carry_in(row)[i];
    if (row.add_d) v += static_cast<float>(result(row)[i]);
    if (kCarry && row.to_carry) carry_out(row)[i] = v; else result(row)[i] = D(v);
  }

  // Index layout: rows marked -1 are padding and stay as they are.
  __device__ __forceinline__ bool row_has_group(int row) const {
    if constexpr (Config::kKind == DG_GEMM_M_INDEX) return reinterpret_cast<const int*>((*target).group_layout)[row] >= 0;
    else return true;
  }
};

}  // namespace deep_gemm
