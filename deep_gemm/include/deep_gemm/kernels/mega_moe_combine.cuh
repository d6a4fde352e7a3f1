// The way back: push writes each row of the window into slot (t, k) of its token's owner; combine sums the slots there, after the barrier.
//
//   y[t] = sum_k p[t,k] * slot[t,k]   forward, FP32, in slot order      dx[t] = sum_k slot[t,k]   backward
// Slots without an expert are never read. A token with a bad id, and every token after a failed barrier, gets NaN.
#pragma once
#include <deep_gemm/comm/rows.cuh>

namespace deep_gemm::kernels {

// One warp: a row of H values, with the expert's bias, to BF16.
template <class Row>
__device__ __forceinline__ void push_row(__nv_bfloat16* to, const Row* from, const __nv_bfloat16* bias, int hidden) {
  if (sizeof(Row) == 2 && !bias) return copy_row(to, from, hidden / 8);
#pragma unroll 2
  for (int column = 8 * lane_index(); column < hidden; column += 256) {
    F32x8 v = load8(from + column);
    if (bias) add8(v, load8(bias + column));
    ptx::st_global_na_v4(to + column, pack_bf16(v));
  }
}

template <class Config>
__device__ __forceinline__ void mega_moe_push(const MegaMoePushParams& params) {
  using Row = typename Config::Row;
  const int rows = rows_in_window(params.group_ends, params.num_local_experts, params.window_begin, params.window_rows);
  for (dg_i64 row = warp_of_grid(); row < rows; row += warps_of_grid()) {
    const MegaMoeRowMeta meta = load_row_meta(params.row_meta, row);
    if (meta.source < 0) continue;
    if (params.rows) {
      auto* slot = peer_pointer<__nv_bfloat16>(params.symm, meta.source, params.combine_offset) + static_cast<dg_i64>(meta.entry) * params.hidden;
      const auto* bias = params.bias ? pointer<const __nv_bfloat16>(params.bias) + static_cast<dg_i64>(meta.expert) * params.hidden : nullptr;
      push_row(slot, pointer<const Row>(params.rows) + row * params.hidden, bias, params.hidden);
    }
    if (params.row_dp && lane_index() == 0)
      peer_pointer<float>(params.symm, meta.source, params.dp_offset)[meta.entry] = pointer<const float>(params.row_dp)[row];
  }
}

// 8 columns of one token. kInFlight slots are loaded before any is summed. Params: slots, weights, slot_expert, num_topk, hidden. The fused kernel
// combines slots that were filled while it ran: hence loads from the L2.
template <int kInFlight, class Params>
__device__ __forceinline__ F32x8 combine_columns(const Params& params, int token, int column, bool aborted) {
  const int first = token * params.num_topk;
  const int* expert = pointer<const int>(params.slot_expert) + first;
  const float* weight = pointer<const float>(params.weights) + first;
  F32x8 sum{};
  bool invalid = aborted;
  for (int k = 0; k < params.num_topk; k += kInFlight) {
    uint4 slot[kInFlight] = {};
    bool exists[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int e = k + i < params.num_topk ? expert[k + i] : DG_SLOT_NONE;
      exists[i] = e >= 0;
      invalid |= e == DG_SLOT_INVALID;
      if (exists[i]) slot[i] = ptx::ld_global_cg_v4(pointer<const __nv_bfloat16>(params.slots) + static_cast<dg_i64>(first + k + i) * params.hidden + column);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (!exists[i]) continue;
      const F32x8 v = unpack_bf16(slot[i]);
      const float p = params.weights ? weight[k + i] : 1.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] = fmaf(p, v[j], sum[j]);  // one rounding a slot, whatever the compiler flags
    }
  }
  if (invalid)
    for (int j = 0; j < 8; ++j) sum[j] = __int_as_float(0x7fffffff);
  return sum;
}

__device__ __forceinline__ void combine_dp(const MegaMoeCombineParams& params, bool aborted) {
  for (int entry = blockIdx.x * blockDim.x + threadIdx.x; entry < params.num_tokens * params.num_topk; entry += gridDim.x * blockDim.x) {
    const int expert = pointer<const int>(params.slot_expert)[entry];
    float dp = expert >= 0 ? pointer<const float>(params.dp_slots)[entry] : 0.f;
    if (aborted || expert == DG_SLOT_INVALID) dp = __int_as_float(0x7fffffff);
    pointer<float>(params.dp_out)[entry] = dp;
  }
}

// out[t] of all tokens: the whole grid. Params: those of combine_columns, out, num_tokens.
template <int kInFlight, class Params>
__device__ __forceinline__ void combine_tokens(const Params& params, bool aborted) {
  const int per_token = params.hidden / 8;
  const dg_i64 items = static_cast<dg_i64>(params.num_tokens) * per_token, stride = static_cast<dg_i64>(gridDim.x) * blockDim.x;
  for (dg_i64 i = static_cast<dg_i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < items; i += stride) {
    const int token = static_cast<int>(i / per_token), column = 8 * static_cast<int>(i - static_cast<dg_i64>(token) * per_token);
    store8(pointer<__nv_bfloat16>(params.out) + static_cast<dg_i64>(token) * params.hidden + column, combine_columns<kInFlight>(params, token, column, aborted));
  }
}

template <class Config>
__device__ __forceinline__ void mega_moe_combine(const MegaMoeCombineParams& params) {
  const bool aborted = pointer<const MegaMoeControl>(params.control)->aborted;
  if (params.dp_out) combine_dp(params, aborted);
  if (params.out) combine_tokens<4>(params, aborted);
}

}  // namespace deep_gemm::kernels
