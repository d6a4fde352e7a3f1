// Pulls the rows of one window from the ranks that own their tokens: row_meta, and x and / or dy rows. A warp per row.
//
// Virtual row -> (expert, source, index) by a search in segment_begin, which the CTA keeps in shared memory ([E_l * R], dynamic).
#pragma once
#include <deep_gemm/comm/rows.cuh>

namespace deep_gemm::kernels {

// The last segment that begins at or before `row`. Empty segments begin where the next one does, so it is the one that can hold the row.
__device__ __forceinline__ int find_segment(const int* segment_begin, int num_segments, int row) {
  int low = 0, high = num_segments;  // segment_begin[low] <= row < segment_begin[high]; segment 0 begins at 0
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (segment_begin[middle] <= row) low = middle; else high = middle;
  }
  return low;
}

__device__ __forceinline__ MegaMoeRowMeta locate_row(const MegaMoeDispatchParams& params, const int* segment_begin, int row) {
  const int i = find_segment(segment_begin, params.num_local_experts * params.num_ranks, row);
  const int expert = i / params.num_ranks, source = i - expert * params.num_ranks;
  const int end = source + 1 < params.num_ranks ? segment_begin[i + 1] : pointer<const int>(params.group_ends)[expert];
  if (row >= end) return {-1, -1, expert, 0.f};  // padding up to the next expert
  const int at = pointer<const int>(params.segment_source)[i] + row - segment_begin[i];
  const int entry = peer_pointer<const int>(params.symm, source, params.src_list_offset)[at];
  return {source, entry, expert, peer_pointer<const float>(params.symm, source, params.weights_offset)[entry]};
}

__device__ __forceinline__ void pull_row(const MegaMoeDispatchParams& params, const MegaMoeRowMeta& meta, dg_field_pointer rows, dg_i64 offset,
                                         dg_i64 row) {
  const dg_i64 row_bytes = 2 * static_cast<dg_i64>(params.hidden), token = meta.entry / params.num_topk;
  copy_row(pointer<char>(rows) + row * row_bytes, peer_pointer<const char>(params.symm, meta.source, offset) + token * row_bytes,
           params.hidden / 8);
}

template <class Config>
__device__ __forceinline__ void mega_moe_dispatch(const MegaMoeDispatchParams& params) {
  const int rows = rows_in_window(params.group_ends, params.num_local_experts, params.window_begin, params.window_rows);
  if (rows == 0) return;
  extern __shared__ int segment_begin[];
  for (int i = threadIdx.x; i < params.num_local_experts * params.num_ranks; i += Config::kThreads)
    segment_begin[i] = pointer<const int>(params.segment_begin)[i];
  __syncthreads();
  for (int row = warp_of_grid(); row < rows; row += warps_of_grid()) {
    const MegaMoeRowMeta meta = locate_row(params, segment_begin, params.window_begin + row);
    if (lane_index() == 0) store_row_meta(params.row_meta, row, meta);
    if (meta.source < 0) continue;
    if (params.x_rows) pull_row(params, meta, params.x_rows, params.x_offset, row);
    if (params.dy_rows) pull_row(params, meta, params.dy_rows, params.dy_offset, row);
  }
}

}  // namespace deep_gemm::kernels
