// The order of work of a one-launch direction of Mega MoE: which tiles a CTA works on, one after another. Every role of the kernel replays it, host
// tests walk it.
//
// Steps over rows (GEMMs whose tiles are rows of one expert) form a chain: GEMM 1, GEMM 2 forward; [GEMM 1,] dgrad 2, dgrad 1 backward. The rows of a
// round (a window of the virtual rows) are cut into units, at most unit_rows of one expert. Each step takes the units in order; a step starts a unit
// when the step before it has handed out `lag_tiles` cluster tiles beyond that unit, or has none left: what a tile needs was begun long before.
// Steps over groups (weight gradients: the contraction runs over an expert's rows) come last, all of one expert after another.
// Cluster tile number t belongs to cluster t % num_clusters. What a tile needs comes from tiles of smaller numbers only. As every CTA works
// through its numbers in ascending order, the smallest unfinished tile can always run.
// At the end of a round, if rows are left, comes one ROUND_END for every CTA: the pool is free for the next round once all have passed it.
#ifndef DEEP_GEMM_SCHEDULE_MEGA_MOE_TILES_H
#define DEEP_GEMM_SCHEDULE_MEGA_MOE_TILES_H

#include <deep_gemm/layout/mega_moe_layout.h>
#include <deep_gemm/schedule/gemm_tiles.h>

// Weight gradients of gate and up are steps of their own, as they may lie in two tensors.
enum {
  DG_STEP_GEMM1, DG_STEP_GEMM2, DG_STEP_DGRAD2, DG_STEP_DGRAD1, DG_STEP_WGRAD2, DG_STEP_WGRAD_GATE, DG_STEP_WGRAD_UP, DG_STEP_ROUND_END
};
#define DG_MEGA_MOE_MAX_CHAIN 3  // steps over rows, and over groups

typedef struct {
  int step, block_n;
  int m, n, k;               // over rows: n, k; over groups: m, n
  int m_blocks, n_blocks;  // how many tiles; over rows: n_blocks
} dg_mega_moe_step;

typedef struct {
  dg_mega_moe_step rows[DG_MEGA_MOE_MAX_CHAIN], groups[DG_MEGA_MOE_MAX_CHAIN];
  int num_row_steps, num_group_steps;  // at least one over rows
  int cluster, band;
  int num_groups, capacity_rows;
  int unit_rows;    // a multiple of DG_MEGA_MOE_ROW_ALIGN, the height of a tile
  int lag_tiles;    // cluster tiles
  int saved_rounds;  // of the first so many rounds, the first step over rows is left out: what it makes was saved
  int store_empty;  // an expert without rows gets a tile with an empty k range in the first round: it stores zeros
} dg_mega_moe_schedule;

typedef struct {
  dg_gemm_tile gemm;  // m_begin, k_begin, k_end: rows in the pool, of this round
  int step;           // DG_STEP_*; of ROUND_END only `round` counts
  int block;          // over rows: number of the row block in virtual rows; over groups: row blocks of this and earlier rounds
  int block_rows;     // that exist; a CTA without a tile (num_rows 0) still loads a part of its neighbour's rows. Over groups: as `block`, in rows
  int round;
  int number;  // of the CTA's tiles; round ends do not count, so that number + round is the place in the sequence
  unsigned k_before;  // k blocks of the CTA's earlier tiles: where its operand ring stands
} dg_mega_moe_tile;

// Rows [begin, end) of `group`, whose segment begins at group_begin.
typedef struct {
  int group, group_begin, begin, end;
} dg_row_unit;

typedef struct {
  int next_tile, num_clusters, cta_in_cluster;
  int round, window_begin;
  // Of each step over rows: the unit that it takes next, whether there is one, cluster tiles handed out in this round, and those of the step before
  // up to the end of `next`.
  dg_row_unit next[DG_MEGA_MOE_MAX_CHAIN];
  int has_next[DG_MEGA_MOE_MAX_CHAIN], emitted[DG_MEGA_MOE_MAX_CHAIN], before_end[DG_MEGA_MOE_MAX_CHAIN];
  int group, group_begin, group_step;  // steps over groups: what comes next
  dg_row_unit unit;                    // under the cursor, with its step, its first cluster tile and their number
  int is_group, place, first_tile, num_tiles;
  int blocks, rows;   // over rows, of this and earlier rounds
  int number;         // of this CTA's next tile
  unsigned k_before;  // it, too
} dg_mega_moe_cursor;

#define DG_K_BLOCK 64  // of every mainloop here
// At least one: a tile with an empty k range multiplies a block that is masked to zero, so that every tile runs the same code.
DG_SHARED int dg_k_blocks(const dg_gemm_tile* tile) { return dg_max(1, (tile->k_end - tile->k_begin + DG_K_BLOCK - 1) / DG_K_BLOCK); }

DG_SHARED dg_mega_moe_step dg_mega_moe_make_step(int step, int block_n, int m, int n, int k) {
  const dg_mega_moe_step made = {step, block_n, m, n, k, dg_ceil_div_int(m, DG_MEGA_MOE_ROW_ALIGN), dg_ceil_div_int(n, block_n)};
  return made;
}

// gate and up fill a tile of GEMM 1 in halves.
DG_SHARED void dg_mega_moe_forward_steps(dg_mega_moe_schedule* s, int n, int hidden, int block_n) {
  s->rows[0] = dg_mega_moe_make_step(DG_STEP_GEMM1, block_n / 2, 0, n, hidden);
  s->rows[1] = dg_mega_moe_make_step(DG_STEP_GEMM2, block_n, 0, hidden, n);
  s->num_row_steps = 2;
  s->num_group_steps = s->saved_rounds = s->store_empty = 0;
}

// Gradients that the backward makes beside that of z.
typedef struct {
  int x, w2, w13;
} dg_mega_moe_wanted;

// GEMM 1 makes z again where it was not saved. dgrad 1 contracts over gate, then up, each to a multiple of a k block.
DG_SHARED void dg_mega_moe_backward_steps(dg_mega_moe_schedule* s, int n, int hidden, int block_n, dg_mega_moe_wanted wanted, int saved_rounds,
                                          int accumulate) {
  int rows = 0, groups = 0;
  s->rows[rows++] = dg_mega_moe_make_step(DG_STEP_GEMM1, block_n / 2, 0, n, hidden);
  s->rows[rows++] = dg_mega_moe_make_step(DG_STEP_DGRAD2, block_n, 0, n, hidden);
  if (wanted.x) s->rows[rows++] = dg_mega_moe_make_step(DG_STEP_DGRAD1, block_n, 0, hidden, 2 * dg_align_int(n, DG_K_BLOCK));
  if (wanted.w2) s->groups[groups++] = dg_mega_moe_make_step(DG_STEP_WGRAD2, block_n, hidden, n, 0);
  if (wanted.w13) s->groups[groups++] = dg_mega_moe_make_step(DG_STEP_WGRAD_GATE, block_n, n, hidden, 0);
  if (wanted.w13) s->groups[groups++] = dg_mega_moe_make_step(DG_STEP_WGRAD_UP, block_n, n, hidden, 0);
  s->num_row_steps = rows;
  s->num_group_steps = groups;
  s->saved_rounds = saved_rounds;
  s->store_empty = !accumulate;
}

// What of a step the functions of gemm_tiles.h read.
DG_SHARED dg_gemm_problem dg_mega_moe_problem(const dg_mega_moe_schedule* s, const dg_mega_moe_step* step) {
  const dg_gemm_problem problem = {DG_GEMM_M_ENDS, DG_MEGA_MOE_ROW_ALIGN, step->block_n, s->cluster, s->band, step->m, step->n, step->k, 0, 0, 0, 0, 0};
  return problem;
}

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
    unit->group_begin = dg_max(unit->group_begin, dg_align_int(end, DG_MEGA_MOE_ROW_ALIGN));
  }
  return 0;
}

DG_SHARED int dg_unit_blocks(const dg_row_unit* unit) { return dg_ceil_div_int(unit->end - unit->begin, DG_MEGA_MOE_ROW_ALIGN); }
DG_SHARED int dg_unit_tiles(const dg_mega_moe_schedule* s, const dg_row_unit* unit, int place) {
  const dg_gemm_problem p = dg_mega_moe_problem(s, &s->rows[place]);
  return dg_gemm_cluster_tiles(&p, dg_unit_blocks(unit), s->rows[place].n_blocks);
}

// The first step of the round's chain.
DG_SHARED int dg_first_row_step(const dg_mega_moe_schedule* s, const dg_mega_moe_cursor* cursor) { return cursor->round < s->saved_rounds; }

DG_SHARED void dg_mega_moe_begin_round(const dg_mega_moe_schedule* s, const int* ends, dg_mega_moe_cursor* cursor) {
  const int first = dg_first_row_step(s, cursor), has = dg_next_unit(s, ends, cursor->window_begin, &cursor->next[s->num_row_steps - 1]);
  for (int i = 0; i < s->num_row_steps; i++) {
    cursor->next[i] = cursor->next[s->num_row_steps - 1];
    cursor->has_next[i] = has && i >= first;
    cursor->emitted[i] = 0;
    cursor->before_end[i] = has && i > first ? dg_unit_tiles(s, &cursor->next[i], i - 1) : 0;
  }
  cursor->group = cursor->group_begin = cursor->group_step = 0;
}

DG_SHARED void dg_mega_moe_begin(const dg_mega_moe_schedule* s, const int* ends, int cta, int num_ctas, dg_mega_moe_cursor* cursor) {
  cursor->num_clusters = num_ctas / s->cluster;
  cursor->next_tile = cta / s->cluster;
  cursor->cta_in_cluster = cta % s->cluster;
  cursor->round = cursor->window_begin = cursor->first_tile = cursor->num_tiles = cursor->number = cursor->blocks = cursor->rows = 0;
  cursor->k_before = 0;
  const dg_row_unit none = {0, 0, 0, 0};
  cursor->unit = cursor->next[s->num_row_steps - 1] = none;
  cursor->is_group = cursor->place = 0;
  dg_mega_moe_begin_round(s, ends, cursor);
}

// The next unit of one of the steps over rows: of the last one whose rows are ready, so that results leave early. 0: the round has no more.
DG_SHARED int dg_mega_moe_next_rows(const dg_mega_moe_schedule* s, const int* ends, dg_mega_moe_cursor* cursor) {
  const int first = dg_first_row_step(s, cursor);
  int i = s->num_row_steps - 1;
  for (; i > first; i--)
    if (cursor->has_next[i] && (!cursor->has_next[i - 1] || cursor->emitted[i - 1] - cursor->before_end[i] >= s->lag_tiles)) break;
  if (!cursor->has_next[i]) return 0;
  cursor->unit = cursor->next[i];
  cursor->is_group = 0;
  cursor->place = i;
  cursor->num_tiles = dg_unit_tiles(s, &cursor->unit, i);
  cursor->emitted[i] += cursor->num_tiles;
  cursor->has_next[i] = dg_next_unit(s, ends, cursor->window_begin, &cursor->next[i]);
  if (i > first && cursor->has_next[i]) cursor->before_end[i] += dg_unit_tiles(s, &cursor->next[i], i - 1);
  if (i == first) {
    cursor->blocks += dg_unit_blocks(&cursor->unit);
    cursor->rows += cursor->unit.end - cursor->unit.begin;
  }
  return 1;
}

// The next step over a group: rows of it in this round, or none at all. 0: the round has no more.
DG_SHARED int dg_mega_moe_next_group(const dg_mega_moe_schedule* s, const int* ends, dg_mega_moe_cursor* cursor) {
  for (; cursor->group < s->num_groups; cursor->group++, cursor->group_step = 0) {
    const int begin = cursor->group_begin, end = ends[cursor->group], window_end = cursor->window_begin + s->capacity_rows;
    const int low = dg_max(begin, cursor->window_begin), high = dg_min(end, window_end);
    const int wanted = low < high || (begin >= end && s->store_empty && cursor->round == 0);
    if (wanted && cursor->group_step < s->num_group_steps) {
      const dg_mega_moe_step* step = &s->groups[cursor->group_step];
      const dg_gemm_problem p = dg_mega_moe_problem(s, step);
      const dg_row_unit unit = {cursor->group, begin, low, high};
      cursor->unit = unit;
      cursor->is_group = 1;
      cursor->place = cursor->group_step++;
      cursor->num_tiles = dg_gemm_cluster_tiles(&p, step->m_blocks, step->n_blocks);
      return 1;
    }
    cursor->group_begin = dg_max(begin, dg_align_int(end, DG_MEGA_MOE_ROW_ALIGN));
  }
  return 0;
}

// Puts the next unit of any step under the cursor; 0 when the round has no more.
DG_SHARED int dg_mega_moe_next_step(const dg_mega_moe_schedule* s, const int* ends, dg_mega_moe_cursor* cursor) {
  cursor->first_tile += cursor->num_tiles;
  cursor->num_tiles = 0;
  return dg_mega_moe_next_rows(s, ends, cursor) || (s->num_group_steps > 0 && dg_mega_moe_next_group(s, ends, cursor));
}

DG_SHARED void dg_place_rows(const dg_mega_moe_schedule* s, const dg_mega_moe_cursor* cursor, int m_block, dg_mega_moe_tile* tile) {
  const int row = cursor->unit.begin + m_block * DG_MEGA_MOE_ROW_ALIGN;
  tile->gemm.m_begin = row - cursor->window_begin;
  tile->gemm.k_begin = 0;
  tile->gemm.k_end = s->rows[cursor->place].k;
  tile->gemm.carry_in = tile->gemm.carry_out = 0;
  tile->block = row / DG_MEGA_MOE_ROW_ALIGN;
  tile->block_rows = tile->gemm.num_rows = dg_min(DG_MEGA_MOE_ROW_ALIGN, cursor->unit.end - row);
}

DG_SHARED void dg_place_group(const dg_mega_moe_schedule* s, const dg_mega_moe_cursor* cursor, const int* ends, int m_block, dg_mega_moe_tile* tile) {
  const dg_row_unit* unit = &cursor->unit;
  const int rows = dg_max(unit->end - unit->begin, 0), window_end = cursor->window_begin + s->capacity_rows;
  tile->gemm.m_begin = m_block * DG_MEGA_MOE_ROW_ALIGN;
  tile->gemm.num_rows = dg_min(DG_MEGA_MOE_ROW_ALIGN, s->groups[cursor->place].m - tile->gemm.m_begin);
  tile->gemm.k_begin = rows > 0 ? unit->begin - cursor->window_begin : 0;
  tile->gemm.k_end = tile->gemm.k_begin + rows;
  tile->gemm.carry_in = rows > 0 && unit->group_begin < cursor->window_begin;
  tile->gemm.carry_out = rows > 0 && ends[unit->group] > window_end;
  tile->block = cursor->blocks;
  tile->block_rows = cursor->rows;
}

// Cluster tile r of the unit under the cursor.
DG_SHARED void dg_mega_moe_place(const dg_mega_moe_schedule* s, const dg_mega_moe_cursor* cursor, const int* ends, int r, dg_mega_moe_tile* tile) {
  const dg_mega_moe_step* step = cursor->is_group ? &s->groups[cursor->place] : &s->rows[cursor->place];
  const dg_gemm_problem p = dg_mega_moe_problem(s, step);
  const int n_blocks = step->n_blocks, m_blocks = cursor->is_group ? step->m_blocks : dg_unit_blocks(&cursor->unit);
  int m_block = 0, n_block = 0;
  dg_gemm_place(&p, r, m_blocks, n_blocks, cursor->cta_in_cluster, &m_block, &n_block, &tile->gemm.share);
  tile->step = step->step;
  tile->gemm.group = cursor->unit.group;
  tile->gemm.n_begin = n_block * p.block_n;
  if (cursor->is_group) dg_place_group(s, cursor, ends, m_block, tile);
  else dg_place_rows(s, cursor, m_block, tile);
  if (n_block >= n_blocks) tile->gemm.num_rows = 0;
}

// The next tile of this CTA, or 0 when there is none. ends: group_ends of the plan.
DG_SHARED int dg_mega_moe_next_tile(const dg_mega_moe_schedule* s, const int* ends, dg_mega_moe_cursor* cursor, dg_mega_moe_tile* tile) {
  tile->round = cursor->round;
  while (cursor->next_tile >= cursor->first_tile + cursor->num_tiles) {
    if (dg_mega_moe_next_step(s, ends, cursor)) continue;
    if (cursor->next[s->num_row_steps - 1].group >= s->num_groups) return 0;
    cursor->window_begin += s->capacity_rows;
    cursor->round++;
    dg_mega_moe_begin_round(s, ends, cursor);
    tile->gemm.group = 0;
    tile->gemm.num_rows = 0;
    tile->step = DG_STEP_ROUND_END;
    tile->number = cursor->number;
    return 1;
  }
  dg_mega_moe_place(s, cursor, ends, cursor->next_tile - cursor->first_tile, tile);
  cursor->next_tile += cursor->num_clusters;
  tile->number = cursor->number++;
  tile->k_before = cursor->k_before;
  cursor->k_before += dg_k_blocks(&tile->gemm);
  return 1;
}

#endif
