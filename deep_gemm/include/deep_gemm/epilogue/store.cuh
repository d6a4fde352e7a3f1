// Plain GEMM epilogue: D = acc, or D += acc in FP32; rows and columns outside the result are not touched.
//
// Whole: a warpgroup's 64 rows go through two staging boxes of 128 bytes per row, in turn, and leave as TMA stores (or, for FP32 D, TMA
// reductions) that run beside the next tile's mainloop. Masked: where TMA cannot leave rows out (partial groups), or where BF16 D or a carry
// must be read first, each warp stages 32 FP32 columns at a time and every lane stores 8 neighbours.
// Named barriers 2 and 3: the threads of math warpgroup 0 and 1.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90_tma.hpp>
#include <deep_gemm/epilogue/vector.cuh>
#include <deep_gemm/layout/gemm_params.h>
#include <deep_gemm/mma/sm90.cuh>
#include <deep_gemm/ptx/fence.cuh>
#include <deep_gemm/schedule/gemm_tiles.h>

namespace deep_gemm {

// What one math warpgroup stages through.
union StoreStaging {
  alignas(1024) uint8_t box[2][kWgmmaM * kSwizzleBytes];  // whole: 128-byte-swizzled rows, as TMA reads them
  // Masked: 16 rows of 32 columns per warp. The pitch puts the four rows that a half-warp writes into different banks.
  float rows[4][kWgmmaM / 4][40];
};
static_assert(sizeof(StoreStaging) == DG_GEMM_STAGING_BYTES);

template <class Config>
struct StoreEpilogue {
  using D = typename Config::D;
  static constexpr bool kGroupOwnsRows = Config::kKind == DG_GEMM_M_MASKED || Config::kKind == DG_GEMM_K_ENDS;
  static constexpr bool kTmaLeavesOutRows = Config::kKind == DG_GEMM_DENSE || Config::kKind == DG_GEMM_K_ENDS;  // the map ends where the rows end
  // FP32 D holds the partial sums of a group that windows cut; BF16 D leaves them to carry_in and carry_out.
  static constexpr bool kFloat = sizeof(D) == 4, kCarry = Config::kKind == DG_GEMM_K_ENDS && !kFloat;
  static constexpr int kBoxColumns = kSwizzleBytes / sizeof(D), kBoxes = Config::kBlockN / kBoxColumns;
  static constexpr int kColumns = 32, kRows = kWgmmaM / 4, kLanesPerRow = kColumns / 8;
  using Acc = Accumulator<Config::kBlockN>;

  const GemmParams& params;
  StoreStaging& staging;
  const int warpgroup;

  __device__ __forceinline__ void run(const dg_gemm_tile& tile, const Acc& acc) const {
    if (is_whole(tile)) {
      store_boxes(tile, acc, ::cuda::std::make_index_sequence<kBoxes>{});
    } else {
      if (leader()) cute::tma_store_wait<0>();  // the boxes of the last tile have been read
      sync();
      store_chunks(tile, acc, ::cuda::std::make_index_sequence<Config::kBlockN / kColumns>{});
    }
  }

  // Before the CTA ends: TMA has read the last boxes.
  __device__ __forceinline__ void finish() const {
    if (leader()) cute::tma_store_wait<0>();
  }

 private:
  __device__ __forceinline__ static bool leader() { return threadIdx.x % 128 == 0; }
  __device__ __forceinline__ void sync() const { cutlass::arch::NamedBarrier::sync(128, 2 + warpgroup); }
  __device__ __forceinline__ const int* layout() const { return reinterpret_cast<const int*>(params.group_layout); }

  __device__ __forceinline__ bool is_whole(const dg_gemm_tile& tile) const {
    const int last = warpgroup * kWgmmaM + kWgmmaM - 1;
    if (!params.d_has_map || (!kFloat && params.accumulate) || (kCarry && (tile.carry_in || tile.carry_out))) return false;
    if (kTmaLeavesOutRows) return true;
    return last < tile.num_rows && (Config::kKind != DG_GEMM_M_INDEX || layout()[tile.m_begin + last] >= 0);
  }

  // ---- whole -----------------------------------------------------------------------------------------------------------------------

  // A pack, not a loop: the compiler gives up unrolling 8 steps, and the accumulator would move to local memory.
  template <size_t... kBox>
  __device__ __forceinline__ void store_boxes(const dg_gemm_tile& tile, const Acc& acc, ::cuda::std::index_sequence<kBox...>) const {
    (store_box<kBox>(tile, acc), ...);
  }

  template <int kBox>
  __device__ __forceinline__ void store_box(const dg_gemm_tile& tile, const Acc& acc) const {
    const int column = tile.n_begin + kBox * kBoxColumns;
    if (column >= params.n) return;
    uint8_t* box = staging.box[kBox % 2];
    // Boxes take turns inside a tile, but a tile may end on either: its first box waits for both, the others for all but the latest store.
    if (leader()) cute::tma_store_wait<kBox == 0 ? 0 : 1>();
    sync();
    stage_box<kBox>(box, acc);
    ptx::fence_proxy_async_shared();
    sync();
    if (leader()) {
      const int row = tile.m_begin + warpgroup * kWgmmaM, group = kGroupOwnsRows ? tile.group : 0;
      if (params.accumulate || tile.carry_in) cute::SM90_TMA_REDUCE_ADD_3D::copy(&params.d_map, box, column, row, group);
      else cute::SM90_TMA_STORE_3D::copy(&params.d_map, box, column, row, group);
      cute::tma_store_arrive();
    }
  }

  // 16-byte chunk c of row r lies at c ^ (r % 8): what SWIZZLE_128B means, and free of bank conflicts.
  template <int kBox>
  __device__ __forceinline__ static void stage_box(uint8_t* box, const Acc& acc) {
    const int thread = threadIdx.x % 128, quad = thread % 4, swizzle = thread % 32 / 4;
#pragma unroll
    for (int j = 0; j < kBoxColumns / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int reg = 4 * (kBox * kBoxColumns / 8 + j) + 2 * half;
        uint8_t* row = box + Acc::row(thread, half) * kSwizzleBytes;
        if constexpr (kFloat) {
          *reinterpret_cast<float2*>(row + (2 * j + quad / 2 ^ swizzle) * 16 + quad % 2 * 8) = make_float2(acc.value[reg], acc.value[reg + 1]);
        } else {
          *reinterpret_cast<__nv_bfloat162*>(row + (j ^ swizzle) * 16 + quad * 4) = __floats2bfloat162_rn(acc.value[reg], acc.value[reg + 1]);
        }
      }
  }

  // ---- masked ----------------------------------------------------------------------------------------------------------------------

  template <size_t... kChunk>
  __device__ __forceinline__ void store_chunks(const dg_gemm_tile& tile, const Acc& acc, ::cuda::std::index_sequence<kChunk...>) const {
    (store_chunk<kChunk>(tile, acc), ...);
  }

  template <int kChunk>
  __device__ __forceinline__ void store_chunk(const dg_gemm_tile& tile, const Acc& acc) const {
    const int lane = threadIdx.x % 32;
    auto& rows = staging.rows[threadIdx.x % 128 / 32];
    __syncwarp();  // the previous chunk has been read
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int reg = 4 * (kChunk * kColumns / 8 + j) + 2 * half;
        *reinterpret_cast<float2*>(&rows[Acc::row(lane, half)][Acc::column(lane, j)]) = make_float2(acc.value[reg], acc.value[reg + 1]);
      }
    __syncwarp();
    store_rows(tile, rows, kChunk * kColumns, lane);
  }

  __device__ __forceinline__ void store_rows(const dg_gemm_tile& tile, const float (&rows)[kRows][40], int first_column, int lane) const {
    const int first_row = warpgroup * kWgmmaM + threadIdx.x % 128 / 32 * kRows;
    const int column = lane % kLanesPerRow * 8, left = params.n - tile.n_begin - first_column - column;
    const bool aligned = (params.n | params.ldd | params.d_group_stride) % 8 == 0 && params.d % 16 == 0;
#pragma unroll 1
    for (int r = lane / kLanesPerRow; r < kRows; r += 32 / kLanesPerRow) {
      const int row = first_row + r;
      if (row >= tile.num_rows || left <= 0 || !row_has_group(tile.m_begin + row)) continue;
      const Row out = row_of(tile, row, first_column + column);
      const float* value = &rows[r][column];
      if (aligned) {
        out.eight(load8(value));
      } else {
        for (int i = 0; i < dg_min(left, 8); ++i) out.one(i, value[i]);
      }
    }
  }

  // Where columns of one row of the result go: to D, or to the carry when the group goes on in a later window.
  struct Row {
    D* d;
    const float* carry_in;
    float* carry_out;
    bool add_d, add_carry, to_carry;

    __device__ __forceinline__ void eight(F32x8 v) const {
      if (kCarry && add_carry) add8(v, load8(carry_in));
      if (add_d) add8(v, load8(d));
      if (kCarry && to_carry) store8(carry_out, v); else store8(d, v);
    }
    __device__ __forceinline__ void one(int i, float v) const {
      if (kCarry && add_carry) v += carry_in[i];
      if (add_d) v += static_cast<float>(d[i]);
      if (kCarry && to_carry) carry_out[i] = v; else d[i] = D(v);
    }
  };

  __device__ __forceinline__ Row row_of(const dg_gemm_tile& tile, int row, int column) const {
    const dg_i64 m = tile.m_begin + row, n = tile.n_begin + column, group = kGroupOwnsRows ? tile.group : 0;
    const bool to_carry = kCarry && tile.carry_out;
    return {reinterpret_cast<D*>(params.d) + group * params.d_group_stride + m * params.ldd + n,
            reinterpret_cast<const float*>(params.carry_in) + m * params.n + n, reinterpret_cast<float*>(params.carry_out) + m * params.n + n,
            params.accumulate ? !to_carry : !kCarry && tile.carry_in, kCarry && tile.carry_in, to_carry};
  }

  // Index layout: rows marked -1 are padding and stay as they are.
  __device__ __forceinline__ bool row_has_group(int row) const { return Config::kKind != DG_GEMM_M_INDEX || layout()[row] >= 0; }
};

}  // namespace deep_gemm
