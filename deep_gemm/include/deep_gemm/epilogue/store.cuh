// Plain GEMM epilogue: D = acc, or D += acc in FP32; rows and columns outside the result are not touched.
//
// A warp's 16 rows go through its own FP32 staging area, 32 columns at a time, so that memory sees whole sectors: each lane owns 8
// neighbouring columns of a row (16 bytes of BF16, 32 of FP32).
#pragma once
#include <cuda_bf16.h>
#include <deep_gemm/layout/gemm_params.h>
#include <deep_gemm/mma/sm90.cuh>
#include <deep_gemm/schedule/gemm_tiles.h>

namespace deep_gemm {

// FP32 view of one element in memory, and of 8 neighbours that lie aligned to 8 elements.
__device__ __forceinline__ float load_f32(const float* p) { return *p; }
__device__ __forceinline__ float load_f32(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ __forceinline__ void store_f32(float* p, float v) { *p = v; }
__device__ __forceinline__ void store_f32(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }

__device__ __forceinline__ void add_f32x8(float (&v)[8], const float* p) {
  const float4 low = reinterpret_cast<const float4*>(p)[0], high = reinterpret_cast<const float4*>(p)[1];
  v[0] += low.x, v[1] += low.y, v[2] += low.z, v[3] += low.w, v[4] += high.x, v[5] += high.y, v[6] += high.z, v[7] += high.w;
}
__device__ __forceinline__ void add_f32x8(float (&v)[8], const __nv_bfloat16* p) {
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[2 * i] += __low2float(pairs[i]), v[2 * i + 1] += __high2float(pairs[i]);
}
__device__ __forceinline__ void store_f32x8(float* p, const float (&v)[8]) {
  reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
__device__ __forceinline__ void store_f32x8(__nv_bfloat16* p, const float (&v)[8]) {
  uint4 raw;
  auto* pairs = reinterpret_cast<__nv_bfloat162*>(&raw);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
  *reinterpret_cast<uint4*>(p) = raw;
}

template <class Config>
struct StoreEpilogue {
  using D = typename Config::D;
  static constexpr int kColumns = DG_GEMM_STAGING_COLUMNS, kRows = kWgmmaM / 4, kLanesPerRow = kColumns / 8;
  // FP32 D holds the partial sums of a group that windows cut; BF16 D leaves them to carry_in and carry_out.
  static constexpr bool kCarry = Config::kKind == DG_GEMM_K_ENDS && sizeof(D) == 2;
  // Row pitch: 8 more columns than used, so that the four rows a half-warp writes fall into different banks.
  struct Staging { float value[kRows][DG_GEMM_STAGING_PITCH]; };

  const GemmParams& params;
  Staging& staging;

  __device__ __forceinline__ void run(const dg_gemm_tile& tile, const Accumulator<Config::kBlockN>& acc, int warpgroup) const {
    run(tile, acc, warpgroup, ::cuda::std::make_index_sequence<Config::kBlockN / kColumns>{});
  }

 private:
  // A pack, not a loop: the compiler gives up unrolling 8 chunks, and the accumulator would move to local memory.
  template <size_t... kChunk>
  __device__ __forceinline__ void run(const dg_gemm_tile& tile, const Accumulator<Config::kBlockN>& acc, int warpgroup, ::cuda::std::index_sequence<kChunk...>) const {
    const int lane = threadIdx.x % 32, first_row = warpgroup * kWgmmaM + threadIdx.x % 128 / 32 * kRows;
    (store_chunk<kChunk>(tile, acc, first_row, lane), ...);
  }

  template <int kChunk>
  __device__ __forceinline__ void store_chunk(const dg_gemm_tile& tile, const Accumulator<Config::kBlockN>& acc, int first_row, int lane) const {
    __syncwarp();  // the previous chunk has been read
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int reg = 4 * (kChunk * kColumns / 8 + j) + 2 * half;
        *reinterpret_cast<float2*>(&staging.value[acc.row(lane, half)][acc.column(lane, j)]) = make_float2(acc.value[reg], acc.value[reg + 1]);
      }
    __syncwarp();
    store_rows(tile, first_row, kChunk * kColumns, lane);
  }

  __device__ __forceinline__ void store_rows(const dg_gemm_tile& tile, int first_row, int first_column, int lane) const {
    const int column = lane % kLanesPerRow * 8, left = params.n - tile.n_begin - first_column - column;
    const bool aligned = (params.n | params.ldd | params.d_group_stride) % 8 == 0 && params.d % 16 == 0;
#pragma unroll 1
    for (int r = lane / kLanesPerRow; r < kRows; r += 32 / kLanesPerRow) {
      const int row = first_row + r;
      if (row >= tile.num_rows || left <= 0 || !row_has_group(tile.m_begin + row)) continue;
      const Row out = row_of(tile, row, first_column + column);
      const float* value = &staging.value[r][column];
      if (aligned) {
        out.eight(value);
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

    __device__ __forceinline__ void eight(const float* value) const {
      float v[8] = {};
      add_f32x8(v, value);
      if (kCarry && add_carry) add_f32x8(v, carry_in);
      if (add_d) add_f32x8(v, d);
      if (kCarry && to_carry) store_f32x8(carry_out, v); else store_f32x8(d, v);
    }
    __device__ __forceinline__ void one(int i, float v) const {
      if (kCarry && add_carry) v += carry_in[i];
      if (add_d) v += load_f32(d + i);
      if (kCarry && to_carry) carry_out[i] = v; else store_f32(d + i, v);
    }
  };

  __device__ __forceinline__ Row row_of(const dg_gemm_tile& tile, int row, int column) const {
    constexpr bool kGroupOwnsRows = Config::kKind == DG_GEMM_M_MASKED || Config::kKind == DG_GEMM_K_ENDS;
    const dg_i64 m = tile.m_begin + row, n = tile.n_begin + column, group = kGroupOwnsRows ? tile.group : 0;
    const bool to_carry = kCarry && tile.carry_out;
    return {reinterpret_cast<D*>(params.d) + group * params.d_group_stride + m * params.ldd + n,
            reinterpret_cast<const float*>(params.carry_in) + m * params.n + n, reinterpret_cast<float*>(params.carry_out) + m * params.n + n,
            params.accumulate ? !to_carry : !kCarry && tile.carry_in, kCarry && tile.carry_in, to_carry};
  }

  // Index layout: rows marked -1 are padding and stay as they are.
  __device__ __forceinline__ bool row_has_group(int row) const {
    return Config::kKind != DG_GEMM_M_INDEX || reinterpret_cast<const int*>(params.group_layout)[row] >= 0;
  }
};

}  // namespace deep_gemm
