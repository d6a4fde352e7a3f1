// Order of work of the one-launch Mega MoE forward: one static sequence of GEMM 1 and GEMM 2 tiles that every CTA replays, and that host tests walk.
//
// A *unit* is up to unit_rows rows of one expert inside one round (window of capacity_rows virtual rows). Units are taken in row order. GEMM 1 of
// unit after unit; GEMM 2 of a unit follows as soon as `lag_tiles` cluster tiles of GEMM 1 come after the unit's own, so that nobody waits for
// activations that are still being written, and never before GEMM 1 of the same rows: a tile depends on tiles with smaller numbers only. As every
// CTA works through its numbers in ascending order, the smallest unfinished tile can always run.
// At the end of a round, if rows are left, comes one ROUND_END for every CTA: the pool is free for the next round once all have passed it.
#ifndef DEEP_GEMM_SCHEDULE_MEGA_MOE_TILES_H
#define DEEP_GEMM_SCHEDULE_MEGA_MOE_TILES_H

#include <deep_gemm/layout/mega_moe_layout.h>
#include <deep_gemm/schedule/gemm_tiles.h>

enum { DG_MEGA_MOE_GEMM1 = 0, DG_MEGA_MOE_GEMM2 = 1, DG_MEGA_MOE_ROUND_END = 2 };

typedef struct {
  dg_gemm_problem gemm[2];  // by DG_MEGA_MOE_GEMM*: block_m, block_n, cluster, band, n, k; kind M_ENDS
  int num_groups, capacity_rows;
  int unit_rows;  // a multiple of block_m
  int lag_tiles;  // cluster tiles of GEMM 1
} dg_mega_moe_schedule;

typedef struct {
  dg_gemm_tile gemm;  // m_begin: row in the pool, of this round
  int step;           // DG_MEGA_MOE_GEMM1, GEMM2 or ROUND_END, of which only `round` counts
  int block;          // number of the row block in virtual rows
  int block_rows;     // that exist; a CTA without a tile (num_rows 0) still loads a part of its neighbour's rows
  int round;
  int number;  // of the CTA's tiles; round ends do not count, so that number + round is the place in the sequence
  unsigned k_before;  // sum of k over the CTA's earlier tiles: where its operand ring stands
} dg_mega_moe_tile;

// Rows [begin, end) of `group`, whose segment begins at group_begin.
typedef struct {
  int group, group_begin, begin, end;
} dg_row_unit;

typedef struct {
  int next_tile, num_clusters, cta_in_cluster;
  int round, window_begin;
  dg_row_unit ahead, behind;  // the units that GEMM 1 and GEMM 2 take next
  int has_ahead, has_behind;
  int emitted, behind_end;  // cluster tiles of GEMM 1 in this round: handed out; up to the end of `behind`
  dg_row_unit unit;         // under the cursor, with its step, its first cluster tile and their number
  int step, first_tile, num_tiles;
  int number;         // of this CTA's next tile
  unsigned k_before;  // it, too
} dg_mega_moe_cursor;

// Moves on to the next unit of the window; 0 when the window has no more.
DG_SHARED int dg_next_unit(const dg_mega_moe_schedule* s, const int* ends, int window_begin, dg_row_unit* unit) {
  for (; unit->group < s->num_groups; unit->group++) {
    const int end = ends[unit->group], window_end = window_begin + s->capacity_rows;
    const int low = dg_max(dg_max(unit->end, unit->group_begin), window_begin), high = dg_min(end, window_end);
    if (low < high) {
      unit->begin = low;
      unit->end = dg_min(low + s->unit_rows, high);
      return 1;
    }
    if (end > window_end) return 0;
    unit->group_begin = dg_max(unit->group_begin, (int)dg_align(end, DG_MEGA_MOE_ROW_ALIGN));
  }
  return 0;
}

DG_SHARED int dg_unit_blocks(const dg_mega_moe_schedule* s, const dg_row_unit* unit) {
  return (int)dg_ceil_div(unit->end - unit->begin, s->gemm[0].block_m);
}
DG_SHARED int dg_unit_tiles(const dg_mega_moe_schedule* s, const dg_row_unit* unit, int step) {
  return dg_gemm_cluster_tiles(&s->gemm[step], dg_unit_blocks(s, unit), (int)dg_ceil_div(s->gemm[step].n, s->gemm[step].block_n));
}

DG_SHARED void dg_mega_moe_begin_round(const dg_mega_moe_schedule* s, const int* ends, dg_mega_moe_cursor* cursor) {
  cursor->has_ahead = dg_next_unit(s, ends, cursor->window_begin, &cursor->ahead);
  cursor->behind = cursor->ahead;
  cursor->has_behind = cursor->has_ahead;
  cursor->emitted = 0;
  cursor->behind_end = cursor->has_behind ? dg_unit_tiles(s, &cursor->behind, DG_MEGA_MOE_GEMM1) : 0;
}

DG_SHARED void dg_mega_moe_begin(const dg_mega_moe_schedule* s, const int* ends, int cta, int num_ctas, dg_mega_moe_cursor* cursor) {
  cursor->num_clusters = num_ctas / s->gemm[0].cluster;
  cursor->next_tile = cta / s->gemm[0].cluster;
  cursor->cta_in_cluster = cta % s->gemm[0].cluster;
  cursor->round = cursor->window_begin = cursor->first_tile = cursor->num_tiles = cursor->number = 0;
  cursor->k_before = 0;
  cursor->ahead.group = cursor->ahead.group_begin = cursor->ahead.begin = cursor->ahead.end = 0;
  cursor->unit = cursor->ahead;
  cursor->step = DG_MEGA_MOE_GEMM1;
  dg_mega_moe_begin_round(s, ends, cursor);
}

// Puts the next unit of either step under the cursor; 0 when the round has no more.
DG_SHARED int dg_mega_moe_next_step(const dg_mega_moe_schedule* s, const int* ends, dg_mega_moe_cursor* cursor) {
  cursor->first_tile += cursor->num_tiles;
  cursor->num_tiles = 0;
  if (cursor->has_ahead && cursor->emitted - cursor->behind_end < s->lag_tiles) {
    cursor->unit = cursor->ahead;
    cursor->step = DG_MEGA_MOE_GEMM1;
    cursor->num_tiles = dg_unit_tiles(s, &cursor->unit, DG_MEGA_MOE_GEMM1);
    cursor->emitted += cursor->num_tiles;
    cursor->has_ahead = dg_next_unit(s, ends, cursor->window_begin, &cursor->ahead);
    return 1;
  }
  if (!cursor->has_behind) return 0;
  cursor->unit = cursor->behind;
  cursor->step = DG_MEGA_MOE_GEMM2;
  cursor->num_tiles = dg_unit_tiles(s, &cursor->unit, DG_MEGA_MOE_GEMM2);
  cursor->has_behind = dg_next_unit(s, ends, cursor->window_begin, &cursor->behind);
  if (cursor->has_behind) cursor->behind_end += dg_unit_tiles(s, &cursor->behind, DG_MEGA_MOE_GEMM1);
  return 1;
}

// Cluster tile r of the unit under the cursor.
DG_SHARED void dg_mega_moe_place(const dg_mega_moe_schedule* s, const dg_mega_moe_cursor* cursor, int r, dg_mega_moe_tile* tile) {
  const dg_gemm_problem* p = &s->gemm[cursor->step];
  const int n_blocks = (int)dg_ceil_div(p->n, p->block_n);
  int m_block = 0, n_block = 0;
  dg_gemm_place(p, r, dg_unit_blocks(s, &cursor->unit), n_blocks, cursor->cta_in_cluster, &m_block, &n_block, &tile->gemm.share);
  const int row = cursor->unit.begin + m_block * p->block_m;
  tile->gemm.group = cursor->unit.group;
  tile->gemm.m_begin = row - cursor->window_begin;
  tile->gemm.n_begin = n_block * p->block_n;
  tile->gemm.k_begin = 0;
  tile->gemm.k_end = p->k;
  tile->gemm.carry_in = tile->gemm.carry_out = 0;
  tile->step = cursor->step;
  tile->block = row / DG_MEGA_MOE_ROW_ALIGN;
  tile->block_rows = dg_min(p->block_m, cursor->unit.end - row);
  tile->gemm.num_rows = n_block < n_blocks ? tile->block_rows : 0;
}

// The next tile of this CTA, or 0 when there is none. ends: group_ends of the plan.
DG_SHARED int dg_mega_moe_next_tile(const dg_mega_moe_schedule* s, const int* ends, dg_mega_moe_cursor* cursor, dg_mega_moe_tile* tile) {
  tile->round = cursor->round;
  while (cursor->next_tile >= cursor->first_tile + cursor->num_tiles) {
    if (dg_mega_moe_next_step(s, ends, cursor)) continue;
    if (cursor->ahead.group >= s->num_groups) return 0;
    cursor->window_begin += s->capacity_rows;
    cursor->round++;
    dg_mega_moe_begin_round(s, ends, cursor);
    tile->gemm.group = 0;
    tile->gemm.num_rows = 0;
    tile->step = DG_MEGA_MOE_ROUND_END;
    tile->number = cursor->number;
    return 1;
  }
  dg_mega_moe_place(s, cursor, cursor->next_tile - cursor->first_tile, tile);
  cursor->next_tile += cursor->num_clusters;
  tile->number = cursor->number++;
  tile->k_before = cursor->k_before;
  cursor->k_before += tile->gemm.k_end;
  return 1;
}

#endif
