// Arguments and shared-memory size of the BF16 GEMM kernels, for host and device.
#ifndef DEEP_GEMM_LAYOUT_GEMM_PARAMS_H
#define DEEP_GEMM_LAYOUT_GEMM_PARAMS_H

#include <deep_gemm/layout/struct_fields.h>
#include <deep_gemm/schedule/gemm_tiles.h>

// a, b          operands, rank-3 maps (inner, rows, groups); the group coordinate is 0 where an operand has no groups
// d_map         d as rank-3 map (n, m, groups), when d_has_map: 16-byte aligned rows
// d             [.., m, n], row stride ldd and group stride d_group_stride in elements
// carry_in/out  FP32 [m, n] or 0, used when D is BF16: partial sum of the k-group that this window's begin (in) or end (out) cuts. Two
//               buffers, as one launch reads the former for one group while it writes the latter for another
// group_layout  int32, by kind: index (a group per row, -1 none), ends, or rows per group; 0 when dense
// gather_rows   int32: which row of gather_source each row of a (m-grouped) or each row of the contraction (k-grouped) is, -1 = zeros; indexed like
//               the rows of the operand that it replaces. gather_source: BF16 rows, 16-byte aligned, stride gather_stride in elements; the last
//               row begins below 64 GiB
// window_*      part of the virtual rows that the operands hold (kinds with ends)
// alignment     of each group's first row (kinds with ends)
// accumulate    1: D += result, 0: D = result
#define DG_GEMM_PARAMS(F)                                                                                      \
  F(tensor_map, a) F(tensor_map, b) F(tensor_map, d_map) F(pointer, d) F(pointer, carry_in) F(pointer, carry_out) F(pointer, group_layout) F(pointer, gather_rows)  \
  F(pointer, gather_source) F(i64, gather_stride) F(i64, ldd)                                                  \
  F(i64, d_group_stride) F(i32, m) F(i32, n) F(i32, k) F(i32, num_groups) F(i32, window_begin)                 \
  F(i32, window_end) F(i32, alignment) F(i32, accumulate) F(i32, d_has_map)
DG_DEFINE_STRUCT(GemmParams, DG_GEMM_PARAMS)

// The GEMMs next to the gated activation (epilogue/gated.cuh), of kind M_ENDS; n = intermediate_hidden, d = a or A'.
// b, b_up               SwiGLU: weights of gate and up, [groups, n, k], as rank-3 maps
// z_gate_map, z_up_map  dSwiGLU: z [m, 2n] as its two halves, rank 2, boxes of 64 rows x 32 columns
// gate_out, up_out      BF16 [m, n] each, row stride gate_up_ld in elements: z, written by SwiGLU if save_z; dSwiGLU: gradient of z, may be z itself
// gate_bias, up_bias    BF16 [groups, n], group stride bias_stride in elements, or 0
// row_weight            address of row 0's FP32 weight p, stride in bytes; 0 = 1
// row_dp                dSwiGLU: FP32 [column tiles, row_dp_stride]
// alpha, up_offset, clamp  deep_gemm/activation.py
// Rows of d, gate_out and up_out begin at multiples of 16 bytes.
#define DG_GEMM_GATED_PARAMS(F)                                                                                            \
  DG_GEMM_PARAMS(F) F(tensor_map, b_up) F(tensor_map, z_gate_map) F(tensor_map, z_up_map) F(pointer, gate_out)             \
  F(pointer, up_out) F(i64, gate_up_ld) F(pointer, gate_bias) F(pointer, up_bias) F(i64, bias_stride)                      \
  F(pointer, row_weight) F(i64, row_weight_stride) F(pointer, row_dp) F(i64, row_dp_stride) F(i32, save_z) F(f32, alpha)   \
  F(f32, up_offset) F(f32, clamp)
DG_DEFINE_STRUCT(GemmGatedParams, DG_GEMM_GATED_PARAMS)

enum { DG_GATHER_NONE = 0, DG_GATHER_A = 1, DG_GATHER_B = 2 };
enum { DG_EPILOGUE_STORE = 0, DG_EPILOGUE_SWIGLU = 1, DG_EPILOGUE_DSWIGLU = 2 };

// One box of the epilogue's staging (epilogue/store.cuh): 64 rows of 128 bytes.
#define DG_GEMM_BOX_BYTES (64 * 128)

// Barriers and rows that dSwiGLU keeps per math warpgroup (epilogue/gated.cuh).
#define DG_GEMM_DSWIGLU_BYTES (3 * 8 + 3 * 64 * 4)

// Dynamic shared memory in bytes: the operand ring, the boxes of two math warpgroups, the ring's full and empty mbarriers, the tile ring,
// the mbarriers by which math warpgroups take turns, what dSwiGLU keeps. The kernel asserts that its SharedStorage has this size.
DG_SHARED dg_i64 dg_gemm_smem_bytes(int block_m, int block_n, int block_k, int num_stages, int staging_boxes) {
  const dg_i64 stages = (dg_i64)num_stages * (block_m + block_n) * block_k * 2, boxes = 2 * (dg_i64)staging_boxes * DG_GEMM_BOX_BYTES;
  return stages + boxes + dg_align(num_stages * 16 + DG_GEMM_TILE_SLOTS * (sizeof(dg_gemm_tile) + 4 + 16) + 16 + 2 * DG_GEMM_DSWIGLU_BYTES, 1024);
}

#endif
