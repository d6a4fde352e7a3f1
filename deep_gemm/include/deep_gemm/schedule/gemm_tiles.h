// Which output tile a CTA works on next: one static order that every role of a kernel replays, and that host tests walk.
//
// Tile number t = cta, cta + num_ctas, ... runs over the tiles of group 0, then of group 1, and so on. Inside a group, bands of
// DG_GEMM_BAND row blocks sweep the columns, so that the rows of a band and the columns in flight stay in L2.
#ifndef DEEP_GEMM_SCHEDULE_GEMM_TILES_H
#define DEEP_GEMM_SCHEDULE_GEMM_TILES_H

#include <deep_gemm/layout/struct_fields.h>

#define DG_GEMM_BAND 8

enum {
  DG_GEMM_DENSE = 0,     // one group, all rows
  DG_GEMM_M_INDEX = 1,   // layout[row] = group of the row or -1; a group starts at a multiple of block_m
  DG_GEMM_M_ENDS = 2,    // layout[g] = virtual end row of group g, which begins at align(layout[g-1], alignment)
  DG_GEMM_M_MASKED = 3,  // layout[g] = rows of group g, which owns group_rows rows
  DG_GEMM_K_ENDS = 4     // like M_ENDS, but the rows are the contraction: one m x n result per group
};

typedef struct {
  int kind, block_m, block_n;
  int m, n, k, num_groups;
  int window_begin, window_end, alignment;
  int store_empty;  // K_ENDS: a group without any row gets a tile with an empty k range (it stores zeros) in the first window
} dg_gemm_problem;

typedef struct {
  int group;
  int m_begin, num_rows;  // first row of the tile in D (inside its group for MASKED and K_ENDS) and how many exist
  int n_begin;
  int k_begin, k_end;     // contraction range, in rows of the operands for K_ENDS
  int carry_in, carry_out;  // K_ENDS: the group began in an earlier window / goes on in a later one
} dg_gemm_tile;

typedef struct {
  int next_tile, num_ctas;
  int group, first_tile, begin;  // group under the cursor, number of tiles before it, its first virtual row
} dg_gemm_cursor;

DG_SHARED dg_gemm_cursor dg_gemm_cursor_begin(int cta, int num_ctas) {
  dg_gemm_cursor cursor = {cta, num_ctas, 0, 0, 0};
  return cursor;
}

DG_SHARED int dg_min(int a, int b) { return a < b ? a : b; }
DG_SHARED int dg_max(int a, int b) { return a > b ? a : b; }

// Position r of a group's tiles -> row block and column block.
DG_SHARED void dg_gemm_raster(int r, int m_blocks, int n_blocks, int* m_block, int* n_block) {
  const int band = r / (DG_GEMM_BAND * n_blocks), first = band * DG_GEMM_BAND;
  const int height = dg_min(DG_GEMM_BAND, m_blocks - first), inside = r - band * DG_GEMM_BAND * n_blocks;
  *m_block = first + inside % height;
  *n_block = inside / height;
}

// Tiles of the group under the cursor, whose virtual rows are [cursor.begin, end).
DG_SHARED int dg_gemm_group_tiles(const dg_gemm_problem* p, int begin, int end) {
  const int n_blocks = (int)dg_ceil_div(p->n, p->block_n);
  const int rows = dg_min(end, p->window_end) - dg_max(begin, p->window_begin);
  if (p->kind == DG_GEMM_K_ENDS) {
    const int empty = begin >= end && p->store_empty && p->window_begin == 0;
    return rows > 0 || empty ? (int)dg_ceil_div(p->m, p->block_m) * n_blocks : 0;
  }
  return rows > 0 ? (int)dg_ceil_div(rows, p->block_m) * n_blocks : 0;
}

DG_SHARED int dg_gemm_group_end(const dg_gemm_problem* p, const int* layout, int group) {
  return p->kind == DG_GEMM_DENSE ? p->m : layout[group];
}

// The next tile of this CTA, or 0 when there is none. `layout` is the group table (unused when dense); for M_INDEX the per-row one.
DG_SHARED int dg_gemm_next_tile(dg_gemm_cursor* cursor, const dg_gemm_problem* p, const int* layout, dg_gemm_tile* tile) {
  const int n_blocks = (int)dg_ceil_div(p->n, p->block_n), t = cursor->next_tile;
  int m_block = 0, n_block = 0;
  cursor->next_tile += cursor->num_ctas;
  tile->k_begin = 0;
  tile->k_end = p->k;
  tile->carry_in = tile->carry_out = 0;
  if (p->kind == DG_GEMM_M_INDEX) {
    const int m_blocks = (int)dg_ceil_div(p->m, p->block_m);
    if (t >= m_blocks * n_blocks) return 0;
    dg_gemm_raster(t, m_blocks, n_blocks, &m_block, &n_block);
    tile->m_begin = m_block * p->block_m;
    tile->num_rows = dg_min(p->block_m, p->m - tile->m_begin);
    tile->n_begin = n_block * p->block_n;
    tile->group = layout[tile->m_begin];
    if (tile->group < 0) tile->num_rows = 0;  // padding block: nothing to do, every role skips it
    return 1;
  }
  for (;; cursor->group++) {
    if (cursor->group >= p->num_groups) return 0;
    const int end = dg_gemm_group_end(p, layout, cursor->group);
    const int tiles = dg_gemm_group_tiles(p, cursor->begin, end);
    if (t < cursor->first_tile + tiles) break;
    cursor->first_tile += tiles;
    cursor->begin = p->kind == DG_GEMM_M_MASKED ? 0 : dg_max(cursor->begin, (int)dg_align(end, p->alignment));
  }
  const int end = dg_gemm_group_end(p, layout, cursor->group);
  const int low = dg_max(cursor->begin, p->window_begin), high = dg_min(end, p->window_end);
  const int rows_in_window = high - low, rows = p->kind == DG_GEMM_K_ENDS ? p->m : rows_in_window;
  dg_gemm_raster(t - cursor->first_tile, (int)dg_ceil_div(rows, p->block_m), n_blocks, &m_block, &n_block);
  tile->group = cursor->group;
  tile->n_begin = n_block * p->block_n;
  tile->m_begin = m_block * p->block_m;
  tile->num_rows = dg_min(p->block_m, rows - tile->m_begin);
  if (p->kind == DG_GEMM_K_ENDS) {
    tile->k_begin = rows_in_window > 0 ? low - p->window_begin : 0;
    tile->k_end = tile->k_begin + dg_max(rows_in_window, 0);
    tile->carry_in = cursor->begin < p->window_begin;
    tile->carry_out = end > p->window_end;
  } else {
    tile->m_begin += low - p->window_begin;
  }
  return 1;
}

#endif
