// Memory of Mega MoE: what lies in a rank's symmetric slab and in its scratch, in which order and for how long. Host and device.
//
// Symbols as in README "The maths". A row is one routed (token, slot); an entry is its number t*K + k on the rank that owns the token.
// The pool holds rows by (local expert, source rank, entry), every expert's segment beginning at a multiple of DG_MEGA_MOE_ROW_ALIGN.
#ifndef DEEP_GEMM_LAYOUT_MEGA_MOE_LAYOUT_H
#define DEEP_GEMM_LAYOUT_MEGA_MOE_LAYOUT_H

#include <deep_gemm/layout/struct_fields.h>

#define DG_MEGA_MOE_ROW_ALIGN 128     // rows; the height of a GEMM tile
#define DG_MEGA_MOE_REGION_ALIGN 1024 // bytes; covers TMA (16) and keeps regions in different sectors
#define DG_MEGA_MOE_ROUTE_BLOCK 2048  // entries that one CTA of the counting sort orders
#define DG_MEGA_MOE_ROUTE_WARPS 8     // warps of that CTA, each with neighbouring entries
#define DG_MEGA_MOE_MAX_EXPERTS 4096  // one counter per expert and warp fits in shared memory
#define DG_MEGA_MOE_MAX_TOPK 16

// slot_expert, besides 0..E-1
#define DG_SLOT_NONE (-1)
#define DG_SLOT_INVALID (-2)  // the caller's id was out of range: the token's result is NaN

// What a rank says in its signal word: low half the epoch, then the tag (phase, and 8 bits that must agree on all ranks).
#define DG_SIGNAL_TAG_SHIFT 32
#define DG_SIGNAL_ABORT 0x8000000000000000ull
#define DG_TAG_DETAIL_SHIFT 8

// P(name): the barriers of a call, in the order in which they come
#define DG_MEGA_MOE_PHASES(P) P(reuse) P(forward_publish) P(forward_push) P(backward_publish) P(backward_push)
#define DG_PHASE_ENUM(name) DG_PHASE_##name,
enum { DG_MEGA_MOE_PHASES(DG_PHASE_ENUM) DG_NUM_PHASES };

// K(name): kinds of fault. Record 0 of the fault records is for ids, record 1 for everything that ends a buffer.
#define DG_MEGA_MOE_FAULTS(K) K(none) K(expert_id) K(late_peer) K(peer_aborted) K(phase_mismatch)
#define DG_FAULT_ENUM(name) DG_FAULT_##name,
enum { DG_MEGA_MOE_FAULTS(DG_FAULT_ENUM) DG_NUM_FAULTS };
enum { DG_FAULT_RECORD_ID, DG_FAULT_RECORD_PEER, DG_NUM_FAULT_RECORDS };

// Device state that outlives a call, zero when the buffer is made.
// epoch           barriers passed so far; pending: peers may still be reading what this rank published
// aborted         a wait has failed: later waits return at once, results are NaN
// bad_entry_key   INT_MAX - (smallest entry with a bad id), 0 = none
#define DG_MEGA_MOE_CONTROL(F) F(u32, epoch) F(u32, pending) F(u32, aborted) F(i32, bad_entry_key)
DG_DEFINE_STRUCT(MegaMoeControl, DG_MEGA_MOE_CONTROL)

// Bad id of a rank's routing, published with it: entry is -1 when there is none.
#define DG_MEGA_MOE_ID_FAULT(F) F(i64, entry) F(i64, value)
DG_DEFINE_STRUCT(MegaMoeIdFault, DG_MEGA_MOE_ID_FAULT)

// Fault record in pinned host memory; kind is written last. late peers: expected/seen are epochs; ids: entry and seen = the value.
#define DG_MEGA_MOE_FAULT(F) \
  F(i64, expected) F(i64, seen) F(i64, entry) F(i32, rank) F(i32, peer) F(u32, tag) F(u32, seen_tag) F(u32, kind)
DG_DEFINE_STRUCT(MegaMoeFault, DG_MEGA_MOE_FAULT)

// Where a pool row comes from: source rank (-1 = padding, the rest is then undefined), entry there, local expert, routing weight.
#define DG_MEGA_MOE_ROW_META(F) F(i32, source) F(i32, entry) F(i32, expert) F(f32, weight)
DG_DEFINE_STRUCT(MegaMoeRowMeta, DG_MEGA_MOE_ROW_META)

// Where an entry stands in the routing of the rank that owns it: its expert (or DG_SLOT_*) and its number among that expert's entries.
#define DG_MEGA_MOE_PLACE(F) F(i32, expert) F(i32, number)
DG_DEFINE_STRUCT(MegaMoePlace, DG_MEGA_MOE_PLACE)

// What the CTAs of a fused launch meet at. barrier: comm/grid_barrier.cuh, whole life. Counted inside one launch: x_rows: rows of x in the pool;
// dz_tiles: dgrad 2 tiles whose results are written.
#define DG_MEGA_MOE_GRID(F) F(u32, barrier) F(u32, x_rows) F(u32, dz_tiles)
DG_DEFINE_STRUCT(MegaMoeGrid, DG_MEGA_MOE_GRID)

// What a fused launch counts per virtual row block. x, dy: rows in the pool; gemm1, dgrad2: tiles whose results are written. And per round (there
// are no more rounds than blocks), round_left: math warpgroups and dispatch warps that have left it. A sum over rounds would not do: one without a
// tile in a round leaves it before others have left the one before.
enum { DG_READY_x, DG_READY_gemm1, DG_READY_dy, DG_READY_dgrad2, DG_READY_round_left, DG_NUM_READY };
#define DG_MEGA_MOE_MAX_CTAS 256

typedef struct {
  dg_i64 num_experts, num_ranks, num_topk, hidden, intermediate_hidden;
  dg_i64 max_tokens;     // per rank
  dg_i64 expected_rows;  // rows per rank that one round should hold: capacity_factor * max_tokens * num_topk
} dg_mega_moe;

DG_SHARED dg_i64 dg_mega_moe_local_experts(const dg_mega_moe* s) { return s->num_experts / s->num_ranks; }
DG_SHARED dg_i64 dg_mega_moe_entries(const dg_mega_moe* s) { return s->max_tokens * s->num_topk; }
DG_SHARED dg_i64 dg_mega_moe_route_blocks(dg_i64 num_entries) { return dg_ceil_div(num_entries, DG_MEGA_MOE_ROUTE_BLOCK); }

// Virtual rows if every entry of every rank came here (a token may name an expert twice), segments aligned.
DG_SHARED dg_i64 dg_mega_moe_worst_rows(const dg_mega_moe* s) {
  return dg_align(s->num_ranks * dg_mega_moe_entries(s), DG_MEGA_MOE_ROW_ALIGN) + dg_mega_moe_local_experts(s) * DG_MEGA_MOE_ROW_ALIGN;
}
// Pool rows C of one round. It decides speed and memory, never the result.
DG_SHARED dg_i64 dg_mega_moe_capacity_rows(const dg_mega_moe* s) {
  const dg_i64 wanted = dg_align(s->expected_rows, DG_MEGA_MOE_ROW_ALIGN) + dg_mega_moe_local_experts(s) * DG_MEGA_MOE_ROW_ALIGN;
  return wanted < dg_mega_moe_worst_rows(s) ? wanted : dg_mega_moe_worst_rows(s);
}
DG_SHARED dg_i64 dg_mega_moe_rounds(const dg_mega_moe* s) { return dg_ceil_div(dg_mega_moe_worst_rows(s), dg_mega_moe_capacity_rows(s)); }
DG_SHARED dg_i64 dg_mega_moe_worst_blocks(const dg_mega_moe* s) { return dg_mega_moe_worst_rows(s) / DG_MEGA_MOE_ROW_ALIGN; }
// Column tiles of dgrad 2, each of which leaves a partial sum of dp for every row.
#define DG_MEGA_MOE_BLOCK_N 192
DG_SHARED dg_i64 dg_mega_moe_dp_tiles(dg_i64 intermediate_hidden) { return dg_ceil_div(intermediate_hidden, DG_MEGA_MOE_BLOCK_N); }
DG_SHARED dg_i64 dg_mega_moe_route_smem_bytes(dg_i64 num_experts) { return num_experts * DG_MEGA_MOE_ROUTE_WARPS * 4; }

// R(name, bytes): symmetric slab of one rank. "published" regions are written by their owner before the publish barrier and read by peers
// until the next barrier; "pushed" regions are written by peers between the two barriers and read by their owner after the second.
//   signals         u64 [DG_MAX_RANKS]  word p is written by rank p only, whole life
//   id_fault        published
//   expert_offsets  published, i32 [E + 1]: entries by expert in src_list, exclusive sums
//   src_list        published, i32 [entries]: entries sorted by expert, stable
//   places          published by fused launches, MegaMoePlace [entries]
//   weights         published, f32 [entries]
//   x, dy           published, BF16 [max_tokens, H]; dy in backward only
//   combine         pushed, BF16 [max_tokens, K, H]
//   dp              pushed, f32 [entries]; backward only
#define DG_MEGA_MOE_SYMM_REGIONS(R)                                                                                              \
  R(signals, 8 * DG_MAX_RANKS) R(id_fault, sizeof(MegaMoeIdFault)) R(expert_offsets, 4 * (s->num_experts + 1))                   \
  R(src_list, 4 * dg_mega_moe_entries(s)) R(places, (dg_i64)sizeof(MegaMoePlace) * dg_mega_moe_entries(s)) R(weights, 4 * dg_mega_moe_entries(s)) R(x, 2 * s->max_tokens * s->hidden)              \
  R(dy, 2 * s->max_tokens * s->hidden) R(combine, 2 * dg_mega_moe_entries(s) * s->hidden) R(dp, 4 * dg_mega_moe_entries(s))

// R(name, bytes): scratch of one rank.
//   control         MegaMoeControl, whole life
//   slot_expert     i32 [entries]: checked ids, from publish to the combine of that call
//   block_counts    i32 [route blocks, E], inside publish
//   group_ends      i32 [E_l]: end of each expert's segment in virtual rows; with the next two from plan to the last push
//   segment_begin   i32 [E_l, R]: first virtual row of (expert, source)
//   segment_source  i32 [E_l, R]: where (expert, source) begins in the source's src_list
//   row_meta        MegaMoeRowMeta [C], row_dp f32 [column tiles, C]: one round; staged kernels use the first C
//   rows            BF16 [2, C, H], one round: x rows, then y rows (forward) or dy rows, overwritten by dx rows (backward). Backward with
//                   split gate and up weights sums dx in FP32 [C, H] over both halves, after the last reader of x and dy.
//   z               BF16 [C, 2I]: pre-activations, overwritten by their gradients; act BF16 [C, I]: a, or dA' overwritten by A'; one round
//   carry13, carry2 f32 [2, 2I, H], [2, H, I]: weight gradients of the expert that a window cuts, all rounds of a backward call; two halves
//                   in turn, as a round reads what the one before left for its first expert and leaves its last expert's
//   bias_sums       f32 [E_l, 2I + H], all rounds of a backward call
// Of fused launches, inside one but for `grid`:
//   grid            MegaMoeGrid, whole life
//   cta_counts      i32 [CTAs, E]: entries of each CTA by expert
//   ready           u32 [DG_NUM_READY, virtual row blocks]
#define DG_MEGA_MOE_SCRATCH_REGIONS(R)                                                                                            \
  R(control, sizeof(MegaMoeControl)) R(slot_expert, 4 * dg_mega_moe_entries(s))                                                   \
  R(block_counts, 4 * dg_mega_moe_route_blocks(dg_mega_moe_entries(s)) * s->num_experts)                                          \
  R(group_ends, 4 * dg_mega_moe_local_experts(s)) R(segment_begin, 4 * s->num_experts) R(segment_source, 4 * s->num_experts)      \
  R(row_meta, (dg_i64)sizeof(MegaMoeRowMeta) * dg_mega_moe_capacity_rows(s)) R(row_dp, 4 * dg_mega_moe_dp_tiles(s->intermediate_hidden) * dg_mega_moe_capacity_rows(s))           \
  R(rows, 2 * 2 * dg_mega_moe_capacity_rows(s) * s->hidden) R(z, 2 * dg_mega_moe_capacity_rows(s) * 2 * s->intermediate_hidden)   \
  R(act, 2 * dg_mega_moe_capacity_rows(s) * s->intermediate_hidden)                                                               \
  R(carry13, dg_mega_moe_rounds(s) > 1 ? 4 * 4 * s->intermediate_hidden * s->hidden : 0)                                          \
  R(carry2, dg_mega_moe_rounds(s) > 1 ? 4 * 2 * s->hidden * s->intermediate_hidden : 0)                                               \
  R(bias_sums, 4 * dg_mega_moe_local_experts(s) * (2 * s->intermediate_hidden + s->hidden))                                       \
  R(grid, sizeof(MegaMoeGrid)) R(cta_counts, 4 * DG_MEGA_MOE_MAX_CTAS * s->num_experts)                                           \
  R(ready, 4 * DG_NUM_READY * dg_mega_moe_worst_blocks(s))

#define DG_SYMM_ENUM(name, bytes) DG_SYMM_##name,
#define DG_SCRATCH_ENUM(name, bytes) DG_SCRATCH_##name,
enum { DG_MEGA_MOE_SYMM_REGIONS(DG_SYMM_ENUM) DG_NUM_SYMM_REGIONS };
enum { DG_MEGA_MOE_SCRATCH_REGIONS(DG_SCRATCH_ENUM) DG_NUM_SCRATCH_REGIONS };

// Byte offset of a region; of DG_NUM_*_REGIONS: the size of the whole.
#define DG_REGION_OFFSET(name, bytes) \
  if (region == at++) return offset;  \
  offset += dg_align((dg_i64)(bytes), DG_MEGA_MOE_REGION_ALIGN);
DG_SHARED dg_i64 dg_mega_moe_symm_offset(const dg_mega_moe* s, int region) {
  dg_i64 offset = 0;
  int at = 0;
  DG_MEGA_MOE_SYMM_REGIONS(DG_REGION_OFFSET)
  return offset;
}
DG_SHARED dg_i64 dg_mega_moe_scratch_offset(const dg_mega_moe* s, int region) {
  dg_i64 offset = 0;
  int at = 0;
  DG_MEGA_MOE_SCRATCH_REGIONS(DG_REGION_OFFSET)
  return offset;
}

#endif
