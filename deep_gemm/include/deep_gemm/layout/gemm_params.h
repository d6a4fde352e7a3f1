// Arguments and shared-memory size of the BF16 GEMM kernels, for host and device.
#ifndef DEEP_GEMM_LAYOUT_GEMM_PARAMS_H
#define DEEP_GEMM_LAYOUT_GEMM_PARAMS_H

#include <deep_gemm/layout/struct_fields.h>

// a, b          operands, rank-3 maps (inner, rows, groups); the group coordinate is 0 where an operand has no groups
// d_map         d as rank-3 map (n, m, groups), when d_has_map: 16-byte aligned rows
// d             [.., m, n], row stride ldd and group stride d_group_stride in elements
// carry_in/out  FP32 [m, n] or 0, used when D is BF16: partial sum of the k-group that this window's begin (in) or end (out) cuts. Two
//               buffers, as one launch reads the former for one group while it writes the latter for another
// group_layout  int32, by kind: index (a group per row, -1 none), ends, or rows per group; 0 when dense
// window_*      part of the virtual rows that the operands hold (kinds with ends)
// alignment     of each group's first row (kinds with ends)
// group_rows    rows that each group owns in a and d (masked)
// accumulate    1: D += result, 0: D = result
#define DG_GEMM_PARAMS(F)                                                                                      \
  F(tensor_map, a) F(tensor_map, b) F(tensor_map, d_map) F(pointer, d) F(pointer, carry_in) F(pointer, carry_out) F(pointer, group_layout) F(i64, ldd)       \
  F(i64, d_group_stride) F(i32, m) F(i32, n) F(i32, k) F(i32, num_groups) F(i32, window_begin)                 \
  F(i32, window_end) F(i32, alignment) F(i32, group_rows) F(i32, accumulate) F(i32, d_has_map)
DG_DEFINE_STRUCT(GemmParams, DG_GEMM_PARAMS)

// Epilogue staging of one math warpgroup (epilogue/store.cuh): two boxes of 64 rows of 128 bytes.
#define DG_GEMM_STAGING_BYTES (2 * 64 * 128)

// Dynamic shared memory in bytes: the operand ring with one full and one empty mbarrier per stage, the epilogue staging, the group
// table, and the slack that aligns the start to 1024 (128-byte swizzle atoms). The kernel asserts that its SharedStorage has this size.
DG_SHARED dg_i64 dg_gemm_smem_bytes(int block_m, int block_n, int block_k, int num_stages, int max_groups) {
  const dg_i64 ring = (dg_i64)num_stages * ((block_m + block_n) * block_k * 2 + 16);
  return 1024 + dg_align(ring, 1024) + (dg_i64)block_m / 64 * DG_GEMM_STAGING_BYTES + dg_align((dg_i64)max_groups * 4, 1024);
}

#endif
