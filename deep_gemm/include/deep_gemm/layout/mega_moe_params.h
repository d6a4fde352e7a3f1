// Arguments of the Mega MoE kernels (kernels/*mega_moe_*.cuh), for host and device. Pointers into a slab of symmetric memory are
// the slab's address of a rank plus an offset of layout/mega_moe_layout.h. An optional pointer is 0 when the part is not wanted.
#ifndef DEEP_GEMM_LAYOUT_MEGA_MOE_PARAMS_H
#define DEEP_GEMM_LAYOUT_MEGA_MOE_PARAMS_H

#include <deep_gemm/layout/mega_moe_layout.h>

// first, second  source tensors of num_vectors * 16 bytes; second is optional
#define DG_MEGA_MOE_COPY_PARAMS(F) \
  F(pointer, first) F(pointer, first_out) F(pointer, second) F(pointer, second_out) F(pointer, control) F(i64, num_vectors)
DG_DEFINE_STRUCT(MegaMoeCopyParams, DG_MEGA_MOE_COPY_PARAMS)

// topk_idx int32 or int64 by idx_bytes, [num_entries]; topk_weights f32 [num_entries]; the rest: regions of the same name
#define DG_MEGA_MOE_ROUTE_PARAMS(F)                                                                                       \
  F(pointer, topk_idx) F(pointer, topk_weights) F(pointer, slot_expert) F(pointer, weights) F(pointer, expert_offsets)    \
  F(pointer, src_list) F(pointer, block_counts) F(pointer, id_fault) F(pointer, control) F(i32, num_entries)              \
  F(i32, num_blocks) F(i32, num_experts) F(i32, idx_bytes)
DG_DEFINE_STRUCT(MegaMoeRouteParams, DG_MEGA_MOE_ROUTE_PARAMS)

// tag             DG_PHASE_* | detail << DG_TAG_DETAIL_SHIFT; only_if_pending: do nothing unless peers may be reading
// pending_after   control.pending once the barrier is passed
#define DG_MEGA_MOE_BARRIER_PARAMS(F)                                                                                   \
  F(peers, symm) F(i64, signals_offset) F(pointer, control) F(pointer, faults) F(u64, timeout_ns) F(u32, tag)           \
  F(i32, rank) F(i32, num_ranks) F(i32, only_if_pending) F(u32, pending_after)
DG_DEFINE_STRUCT(MegaMoeBarrierParams, DG_MEGA_MOE_BARRIER_PARAMS)

#define DG_MEGA_MOE_PLAN_PARAMS(F)                                                                                      \
  F(peers, symm) F(i64, expert_offsets_offset) F(i64, id_fault_offset) F(pointer, group_ends) F(pointer, segment_begin) \
  F(pointer, segment_source) F(pointer, control) F(pointer, faults) F(i32, rank) F(i32, num_ranks)                      \
  F(i32, num_local_experts)
DG_DEFINE_STRUCT(MegaMoePlanParams, DG_MEGA_MOE_PLAN_PARAMS)

// x_rows, dy_rows optional. The window holds virtual rows [window_begin, window_begin + window_rows).
#define DG_MEGA_MOE_DISPATCH_PARAMS(F)                                                                                  \
  F(peers, symm) F(i64, x_offset) F(i64, dy_offset) F(i64, src_list_offset) F(i64, weights_offset) F(pointer, x_rows)   \
  F(pointer, dy_rows) F(pointer, row_meta) F(pointer, group_ends) F(pointer, segment_begin) F(pointer, segment_source)  \
  F(i32, num_ranks) F(i32, num_local_experts) F(i32, num_topk) F(i32, hidden) F(i32, window_begin) F(i32, window_rows)
DG_DEFINE_STRUCT(MegaMoeDispatchParams, DG_MEGA_MOE_DISPATCH_PARAMS)

// z [rows, 2I]; gate_bias, up_bias: BF16, expert e at e * bias_stride, optional; a [rows, I]; weighted: a * routing weight
#define DG_MEGA_MOE_SWIGLU_PARAMS(F)                                                                                    \
  F(pointer, z) F(pointer, gate_bias) F(pointer, up_bias) F(pointer, a) F(pointer, row_meta) F(pointer, group_ends)     \
  F(i64, bias_stride) F(i32, num_local_experts) F(i32, intermediate_hidden) F(i32, window_begin) F(i32, window_rows)    \
  F(i32, weighted) F(f32, alpha) F(f32, up_offset) F(f32, clamp)
DG_DEFINE_STRUCT(MegaMoeSwigluParams, DG_MEGA_MOE_SWIGLU_PARAMS)

// act: dA' [rows, I] in, A' = p * a out; z in, dz out (may be the same); row_dp f32 [rows]; b2 [E_l, H] with dy [rows, H] optional
#define DG_MEGA_MOE_DSWIGLU_PARAMS(F)                                                                                   \
  F(pointer, z) F(pointer, gate_bias) F(pointer, up_bias) F(pointer, act) F(pointer, dz) F(pointer, row_dp)             \
  F(pointer, dy) F(pointer, b2) F(pointer, row_meta) F(pointer, group_ends) F(i64, bias_stride)                         \
  F(i32, num_local_experts) F(i32, intermediate_hidden) F(i32, hidden) F(i32, window_begin) F(i32, window_rows)         \
  F(f32, alpha) F(f32, up_offset) F(f32, clamp)
DG_DEFINE_STRUCT(MegaMoeDswigluParams, DG_MEGA_MOE_DSWIGLU_PARAMS)

// rows [rows, H] BF16 or FP32, optional; bias BF16 [E_l, H], optional; row_dp f32 [rows], optional
#define DG_MEGA_MOE_PUSH_PARAMS(F)                                                                                      \
  F(peers, symm) F(i64, combine_offset) F(i64, dp_offset) F(pointer, rows) F(pointer, bias) F(pointer, row_dp)          \
  F(pointer, row_meta) F(pointer, group_ends) F(i32, num_local_experts) F(i32, hidden) F(i32, window_begin)             \
  F(i32, window_rows)
DG_DEFINE_STRUCT(MegaMoePushParams, DG_MEGA_MOE_PUSH_PARAMS)

// slots BF16 [T, K, H] -> out BF16 [T, H], optional; weights f32 [T, K], 0 = 1; dp_slots f32 [T, K] -> dp_out f32 [T, K], optional
#define DG_MEGA_MOE_COMBINE_PARAMS(F)                                                                                   \
  F(pointer, slots) F(pointer, weights) F(pointer, slot_expert) F(pointer, out) F(pointer, dp_slots) F(pointer, dp_out) \
  F(pointer, control) F(i32, num_tokens) F(i32, num_topk) F(i32, hidden)
DG_DEFINE_STRUCT(MegaMoeCombineParams, DG_MEGA_MOE_COMBINE_PARAMS)

// Column sums per expert of rows [rows, columns] (BF16, row_stride elements), each row times its routing weight if `weighted`.
// sums f32 [E_l, columns] carries them from round to round; the last one writes (or adds to) out [E_l, columns], BF16 or FP32.
#define DG_MEGA_MOE_BIAS_GRAD_PARAMS(F)                                                                                 \
  F(pointer, rows) F(pointer, row_meta) F(pointer, group_ends) F(pointer, sums) F(pointer, out) F(i64, row_stride)      \
  F(i32, columns) F(i32, window_begin) F(i32, window_rows) F(i32, weighted) F(i32, first) F(i32, last)                  \
  F(i32, out_is_f32) F(i32, accumulate)
DG_DEFINE_STRUCT(MegaMoeBiasGradParams, DG_MEGA_MOE_BIAS_GRAD_PARAMS)

// What both fused launches take. d .. clamp: as in GemmGatedParams; n: intermediate_hidden.
// x [T, H], topk_idx (int32 or int64 by idx_bytes) and weights f32 [T, K], out [T, H]: of the caller; slots, the offsets and the rest: regions
// publish_tag, push_tag  of the two barriers, as in MegaMoeBarrierParams
// num_blocks      row blocks that `ready` counts; unit_rows, lag_tiles: schedule/mega_moe_tiles.h; cluster and band are the variant's
#define DG_MEGA_MOE_FUSED_PARAMS(F)                                                                                         \
  F(pointer, d) F(i64, ldd) F(pointer, gate_out) F(pointer, up_out) F(i64, gate_up_ld)                                      \
  F(pointer, gate_bias) F(pointer, up_bias) F(i64, bias_stride) F(pointer, row_weight) F(i64, row_weight_stride)            \
  F(peers, symm) F(i64, signals_offset) F(i64, id_fault_offset) F(i64, expert_offsets_offset) F(i64, src_list_offset)       \
  F(i64, places_offset) F(i64, x_offset) F(i64, combine_offset) F(pointer, x) F(pointer, topk_idx) F(pointer, weights)      \
  F(pointer, out) F(pointer, slots) F(pointer, slot_expert) F(pointer, x_rows) F(pointer, row_meta) F(pointer, group_ends)  \
  F(pointer, segment_begin) F(pointer, segment_source) F(pointer, cta_counts) F(pointer, ready) F(pointer, grid)            \
  F(pointer, control) F(pointer, faults) F(u64, timeout_ns) F(u32, publish_tag) F(u32, push_tag) F(i32, rank)               \
  F(i32, num_ranks) F(i32, num_tokens) F(i32, num_topk) F(i32, idx_bytes) F(i32, num_experts) F(i32, num_local_experts)     \
  F(i32, hidden) F(i32, n) F(i32, capacity_rows) F(i32, num_blocks) F(i32, unit_rows) F(i32, lag_tiles) F(f32, alpha)       \
  F(f32, up_offset) F(f32, clamp)

// The fused forward (kernels/sm90_mega_moe_forward.cuh). Maps: x_map, act_map: pool rows as operands; gate_map, up_map, w2_map: weights
// [E_l, .., k] as K-major operands. d: a [C, I]; gate_out, up_out: halves of z [C, 2I].
// b2: BF16 [E_l, H], expert stride b2_stride, optional
#define DG_MEGA_MOE_FORWARD_PARAMS(F)                                                                                     \
  F(tensor_map, x_map) F(tensor_map, act_map) F(tensor_map, gate_map) F(tensor_map, up_map) F(tensor_map, w2_map)         \
  DG_MEGA_MOE_FUSED_PARAMS(F) F(pointer, b2) F(i64, b2_stride) F(i32, save_z)
DG_DEFINE_STRUCT(MegaMoeForwardParams, DG_MEGA_MOE_FORWARD_PARAMS)

// Where the gradient of one weight goes: d [E_l, m, n] with its map, carries f32 [m, n], fields as in GemmParams. In odd rounds the two carries
// change places.
#define DG_WGRAD_TARGET(F, name)                                                                                          \
  F(tensor_map, name##_map) F(pointer, name) F(pointer, name##_carry_in) F(pointer, name##_carry_out) F(i64, name##_ldd)  \
  F(i64, name##_group_stride) F(i32, name##_n) F(i32, name##_accumulate) F(i32, name##_has_map) F(i32, name##_unused)
#define DG_WGRAD_TARGET_FIELDS(F)                                                                                         \
  F(tensor_map, d_map) F(pointer, d) F(pointer, carry_in) F(pointer, carry_out) F(i64, ldd) F(i64, d_group_stride)        \
  F(i32, n) F(i32, accumulate) F(i32, d_has_map) F(i32, unused)
DG_DEFINE_STRUCT(WgradTarget, DG_WGRAD_TARGET_FIELDS)
#define DG_WGRAD_TARGET_BYTES 192  // a multiple of a map's alignment: targets that follow each other in an argument are an array

// The fused backward (kernels/sm90_mega_moe_backward.cuh). Operand maps: pool rows of x, dy, A' and dZ with the hidden or intermediate dimension as k
// (x_map ..) or the rows as k (.._rows_map); weights for GEMM 1 (gate_map, up_map) and, with k along the other dimension, for the dgrads (.._t_map).
// z_gate_map, z_up_map: z of the saved rounds; z_again_..: of the others, which is where gate_out and up_out, the gradient of z, lie. d: A' [C, I].
// dw2, dw_gate, dw_up     weight gradients
// out [T, H] dx, dp_out f32 [T, K]: of the caller; dy [T, H] too; dp_slots, dy_rows, row_dp [column tiles, row_dp_stride] and the offsets: regions
// saved_rounds            0 or 1: the first round has z of the forward; the others recompute it
// wants_dx, wants_dp, wants_dw2, wants_dw13   what is made; a gradient that is not wanted costs nothing
#define DG_MEGA_MOE_BACKWARD_PARAMS(F)                                                                                     \
  F(tensor_map, x_map) F(tensor_map, dy_map) F(tensor_map, dz_gate_k_map) F(tensor_map, dz_up_k_map) F(tensor_map, x_rows_map) \
  F(tensor_map, dy_rows_map) F(tensor_map, act_rows_map) F(tensor_map, dz_gate_rows_map) F(tensor_map, dz_up_rows_map)     \
  F(tensor_map, gate_map) F(tensor_map, up_map) F(tensor_map, gate_t_map) F(tensor_map, up_t_map) F(tensor_map, w2_t_map)  \
  F(tensor_map, z_gate_map) F(tensor_map, z_up_map) F(tensor_map, z_again_gate_map) F(tensor_map, z_again_up_map)          \
  DG_WGRAD_TARGET(F, dw2) DG_WGRAD_TARGET(F, dw_gate) DG_WGRAD_TARGET(F, dw_up) DG_MEGA_MOE_FUSED_PARAMS(F)                \
  F(i64, dy_offset) F(i64, weights_offset) F(i64, dp_offset) F(pointer, dy) F(pointer, dy_rows) F(pointer, dp_slots)       \
  F(pointer, dp_out) F(pointer, row_dp) F(i64, row_dp_stride) F(i32, saved_rounds) F(i32, wants_dx) F(i32, wants_dp)       \
  F(i32, wants_dw2) F(i32, wants_dw13) F(i32, accumulate)
DG_DEFINE_STRUCT(MegaMoeBackwardParams, DG_MEGA_MOE_BACKWARD_PARAMS)

// Shared memory of the fused launches: the operand ring; staging: forward per math warpgroup, of 64 rows to push, each of which
// is followed by 16 bytes so that rows lie in different banks; backward one for both; per dispatch warp slots of one chunk; all barriers, the tile ring and the schedule.
#define DG_DISPATCH_WARPS 2
#define DG_DISPATCH_SLOTS 4
#define DG_DISPATCH_CHUNK 2048  // bytes
DG_SHARED dg_i64 dg_mega_moe_ring_bytes(int block_n, int num_stages) { return (dg_i64)num_stages * (128 + block_n) * 64 * 2; }
DG_SHARED dg_i64 dg_mega_moe_staging_bytes(int block_n) { return dg_align(64 * (2 * (dg_i64)block_n + 16), 1024); }
DG_SHARED dg_i64 dg_mega_moe_forward_smem_bytes(int block_n, int num_stages) {
  const dg_i64 dispatch = DG_DISPATCH_WARPS * DG_DISPATCH_SLOTS * DG_DISPATCH_CHUNK;
  return dg_mega_moe_ring_bytes(block_n, num_stages) + 2 * dg_mega_moe_staging_bytes(block_n) + dispatch + 1024;
}
#define DG_BACKWARD_STAGING_BOXES 4  // of a weight gradient; z of dSwiGLU and rows to push take less
DG_SHARED dg_i64 dg_mega_moe_backward_smem_bytes(int block_n, int num_stages) {
  const dg_i64 dispatch = DG_DISPATCH_WARPS * DG_DISPATCH_SLOTS * DG_DISPATCH_CHUNK;
  return dg_mega_moe_ring_bytes(block_n, num_stages) + DG_BACKWARD_STAGING_BOXES * 64 * 128 + dispatch + 2048;
}

#define DG_MEGA_MOE_STRUCTS(S)                            \
  S(MegaMoeControl, DG_MEGA_MOE_CONTROL)                  \
  S(MegaMoeFault, DG_MEGA_MOE_FAULT)                      \
  S(MegaMoeRowMeta, DG_MEGA_MOE_ROW_META)                 \
  S(MegaMoeIdFault, DG_MEGA_MOE_ID_FAULT)                 \
  S(MegaMoePlace, DG_MEGA_MOE_PLACE)                      \
  S(MegaMoeGrid, DG_MEGA_MOE_GRID)                        \
  S(MegaMoeForwardParams, DG_MEGA_MOE_FORWARD_PARAMS)     \
  S(MegaMoeBackwardParams, DG_MEGA_MOE_BACKWARD_PARAMS)   \
  S(WgradTarget, DG_WGRAD_TARGET_FIELDS)                  \
  S(MegaMoeCopyParams, DG_MEGA_MOE_COPY_PARAMS)           \
  S(MegaMoeRouteParams, DG_MEGA_MOE_ROUTE_PARAMS)         \
  S(MegaMoeBarrierParams, DG_MEGA_MOE_BARRIER_PARAMS)     \
  S(MegaMoePlanParams, DG_MEGA_MOE_PLAN_PARAMS)           \
  S(MegaMoeDispatchParams, DG_MEGA_MOE_DISPATCH_PARAMS)   \
  S(MegaMoeSwigluParams, DG_MEGA_MOE_SWIGLU_PARAMS)       \
  S(MegaMoeDswigluParams, DG_MEGA_MOE_DSWIGLU_PARAMS)     \
  S(MegaMoePushParams, DG_MEGA_MOE_PUSH_PARAMS)           \
  S(MegaMoeCombineParams, DG_MEGA_MOE_COMBINE_PARAMS)     \
  S(MegaMoeBiasGradParams, DG_MEGA_MOE_BIAS_GRAD_PARAMS)

#endif
