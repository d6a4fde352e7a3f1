// Pool rows: which of them exist in the present window, and copies of one row by a warp.
#pragma once
#include <deep_gemm/comm/fault.cuh>
#include <deep_gemm/epilogue/vector.cuh>

namespace deep_gemm {

// Rows of the window that lie before the end of the last expert, padding between experts included.
__device__ __forceinline__ int rows_in_window(dg_field_pointer group_ends, int num_local_experts, int window_begin, int window_rows) {
  const int rows = pointer<const int>(group_ends)[num_local_experts - 1] - window_begin;
  return min(max(rows, 0), window_rows);
}

// 16 bytes, the same for all lanes of a warp that ask for one row.
__device__ __forceinline__ MegaMoeRowMeta load_row_meta(dg_field_pointer row_meta, dg_i64 row) {
  const int4 raw = pointer<const int4>(row_meta)[row];
  return {raw.x, raw.y, raw.z, __int_as_float(raw.w)};
}
__device__ __forceinline__ void store_row_meta(dg_field_pointer row_meta, dg_i64 row, const MegaMoeRowMeta& meta) {
  pointer<int4>(row_meta)[row] = make_int4(meta.source, meta.entry, meta.expert, __float_as_int(meta.weight));
}

__device__ __forceinline__ int lane_index() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_of_grid() { return (blockIdx.x * blockDim.x + threadIdx.x) / 32; }
__device__ __forceinline__ int warps_of_grid() { return gridDim.x * blockDim.x / 32; }

// One warp copies a row of `num_vectors` * 16 bytes that no one writes meanwhile. 8 loads in flight per lane hide NVLink's latency.
__device__ __forceinline__ void copy_row(void* to, const void* from, int num_vectors) {
  constexpr int kInFlight = 8;
  for (int base = lane_index(); base < num_vectors; base += 32 * kInFlight) {
    uint4 v[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (base + 32 * i < num_vectors) v[i] = ptx::ld_global_nc_v4(static_cast<const uint4*>(from) + base + 32 * i);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (base + 32 * i < num_vectors) ptx::st_global_na_v4(static_cast<uint4*>(to) + base + 32 * i, v[i]);
  }
}

}  // namespace deep_gemm
