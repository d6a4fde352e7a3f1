// Gradient of an expert bias: column sums of the expert's rows, db13 = sum dZ, db2 = sum p * dy. Grid: (blocks of 256 columns, local experts).
//
// Order of a sum: warp w takes rows w, w + 8, ... of the window; then warps 0..7; then windows. So bits depend on C and the routing only.
#pragma once
#include <deep_gemm/comm/rows.cuh>

namespace deep_gemm::kernels {

// Rows [begin, end) of the pool that belong to this expert.
struct PoolRange { int begin, end; };

__device__ __forceinline__ PoolRange rows_of_expert(const MegaMoeBiasGradParams& params, int expert) {
  const int* ends = pointer<const int>(params.group_ends);
  const int begin = expert == 0 ? 0 : static_cast<int>(dg_align(ends[expert - 1], DG_MEGA_MOE_ROW_ALIGN));
  return {max(begin - params.window_begin, 0), min(ends[expert] - params.window_begin, params.window_rows)};
}

// One lane: 8 columns, every kWarps-th row.
template <int kWarps>
__device__ __forceinline__ F32x8 sum_rows(const MegaMoeBiasGradParams& params, PoolRange range, int column) {
  F32x8 sum{};
#pragma unroll 4
  for (dg_i64 row = range.begin + threadIdx.x / 32; row < range.end; row += kWarps) {
    const F32x8 v = load8(pointer<const __nv_bfloat16>(params.rows) + row * params.row_stride + column);
    const float scale = params.weighted ? load_row_meta(params.row_meta, row).weight : 1.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += scale * v[i];
  }
  return sum;
}

__device__ __forceinline__ void finish_column(const MegaMoeBiasGradParams& params, dg_i64 at, float sum) {
  if (!params.first) sum += pointer<const float>(params.sums)[at];
  if (!params.last) {
    pointer<float>(params.sums)[at] = sum;
  } else if (params.out_is_f32) {
    float* out = pointer<float>(params.out) + at;
    *out = params.accumulate ? *out + sum : sum;
  } else {
    __nv_bfloat16* out = pointer<__nv_bfloat16>(params.out) + at;
    *out = __float2bfloat16_rn(params.accumulate ? __bfloat162float(*out) + sum : sum);
  }
}

template <class Config>
__device__ __forceinline__ void mega_moe_bias_grad(const MegaMoeBiasGradParams& params) {
  constexpr int kColumns = 256, kWarps = Config::kThreads / 32;
  static_assert(Config::kThreads == kColumns, "a thread per column in the last sum");
  __shared__ float partial[kWarps][kColumns];
  const int first = blockIdx.x * kColumns, expert = blockIdx.y, column = 8 * lane_index();
  F32x8 sum{};
  if (first + column < params.columns) sum = sum_rows<kWarps>(params, rows_of_expert(params, expert), first + column);
  store8(&partial[threadIdx.x / 32][column], sum);
  __syncthreads();
  if (first + static_cast<int>(threadIdx.x) >= params.columns) return;
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += partial[w][threadIdx.x];
  finish_column(params, static_cast<dg_i64>(expert) * params.columns + first + threadIdx.x, total);
}

}  // namespace deep_gemm::kernels
