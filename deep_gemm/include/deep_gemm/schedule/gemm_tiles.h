// Which output tile a CTA works on next: one static order that every role of a kernel replays, and that host tests walk.
//
// A cluster of `cluster` CTAs (1 or 2) works on as many tiles at a time. Two CTAs take two row blocks of one column (they share the B tile)
// or, for the last row of an odd number, two columns of one row block (they share the A tile): each loads half of what is shared and
// multicasts it. Cluster tile number t = cluster, cluster + num_clusters, ... runs over the cluster tiles of group 0, then of group 1, and so
// on. Inside a group, bands of `band` row blocks sweep the columns, so that the rows of a band and the columns in flight stay in L2.
#ifndef DEEP_GEMM_SCHEDULE_GEMM_TILES_H
#define DEEP_GEMM_SCHEDULE_GEMM_TILES_H

#include <deep_gemm/layout/struct_fields.h>

#define DG_GEMM_TILE_SLOTS 4  // tiles that the schedule thread may be ahead of the last reader (schedule/tile_ring.cuh)

enum {
  DG_GEMM_DENSE = 0,     // one group, all rows
  DG_GEMM_M_INDEX = 1,   // layout[row] = group of the row or -1; a group starts at a multiple of block_m
  DG_GEMM_M_ENDS = 2,    // layout[g] = virtual end row of group g, which begins at align(layout[g-1], alignment)
  DG_GEMM_M_MASKED = 3,  // layout[g] = rows of group g, which owns m rows
  DG_GEMM_K_ENDS = 4     // like M_ENDS, but the rows are the contraction: one m x n result per group
};

enum { DG_GEMM_SHARE_NONE = 0, DG_GEMM_SHARE_A = 1, DG_GEMM_SHARE_B = 2 };

typedef struct {
  int kind, block_m, block_n, cluster, band;
  int m, n, k, num_groups;
  int window_begin, window_end, alignment;
  int store_empty;  // K_ENDS: a group without any row gets a tile with an empty k range (it stores zeros) in the first window
} dg_gemm_problem;

typedef struct {
  int group;
  int m_begin, num_rows;  // first row of the tile in D (inside its group for MASKED and K_ENDS) and how many exist; 0: nothing to store
  int n_begin;
  int k_begin, k_end;     // contraction range, in rows of the operands for K_ENDS
  int carry_in, carry_out;  // K_ENDS: the group began in an earlier window / goes on in a later one
  int share;                // DG_GEMM_SHARE_*: the operand tile that both CTAs of the cluster load
} dg_gemm_tile;

typedef struct {
  int next_tile, num_clusters, cta_in_cluster;
  int group, first_tile, begin;  // group under the cursor, number of tiles before it, its first virtual row
} dg_gemm_cursor;

DG_SHARED dg_gemm_cursor dg_gemm_cursor_begin(int cta, int num_ctas, int cluster) {
  dg_gemm_cursor cursor = {cta / cluster, num_ctas / cluster, cta % cluster, 0, 0, 0};
  return cursor;
}

DG_SHARED int dg_min(int a, int b) { return a < b ? a : b; }
DG_SHARED int dg_max(int a, int b) { return a > b ? a : b; }

// How many pairs of row blocks two CTAs take. By index, neighbouring row blocks may belong to different groups: there they share rows only.
DG_SHARED int dg_gemm_row_pairs(const dg_gemm_problem* p, int m_blocks) {
  return p->cluster == 1 || p->kind == DG_GEMM_M_INDEX ? 0 : m_blocks / 2;
}

// Cluster tiles of m_blocks x n_blocks: pairs of row blocks first, then the row blocks that are left.
DG_SHARED int dg_gemm_cluster_tiles(const dg_gemm_problem* p, int m_blocks, int n_blocks) {
  const int pairs = dg_gemm_row_pairs(p, m_blocks), single = m_blocks - 2 * pairs;
  return pairs * n_blocks + single * dg_ceil_div_int(n_blocks, p->cluster);
}

// Position r in rows x columns, swept in bands of `band` rows.
DG_SHARED void dg_gemm_raster(int r, int rows, int columns, int band, int* row, int* column) {
  const int number = r / (band * columns), first = number * band, height = dg_min(band, rows - first), inside = r - first * columns;
  *row = first + inside % height;
  *column = inside / height;
}

// Cluster tile r of a group -> the blocks of this CTA and what it shares. A column block past the end is a CTA without work of its own.
DG_SHARED void dg_gemm_place(const dg_gemm_problem* p, int r, int m_blocks, int n_blocks, int cta, int* m_block, int* n_block, int* share) {
  const int pairs = dg_gemm_row_pairs(p, m_blocks);
  if (r < pairs * n_blocks) {
    dg_gemm_raster(r, pairs, n_blocks, dg_max(1, p->band / 2), m_block, n_block);
    *m_block = 2 * *m_block + cta;
    *share = DG_GEMM_SHARE_B;
    return;
  }
  dg_gemm_raster(r - pairs * n_blocks, m_blocks - 2 * pairs, dg_ceil_div_int(n_blocks, p->cluster), p->band, m_block, n_block);
  *m_block += 2 * pairs;
  *n_block = p->cluster * *n_block + cta;
  *share = p->cluster == 1 ? DG_GEMM_SHARE_NONE : DG_GEMM_SHARE_A;
}

// Cluster tiles of the group under the cursor, whose virtual rows are [cursor.begin, end).
DG_SHARED int dg_gemm_group_tiles(const dg_gemm_problem* p, int begin, int end) {
  const int n_blocks = dg_ceil_div_int(p->n, p->block_n);
  const int rows = dg_min(end, p->window_end) - dg_max(begin, p->window_begin);
  if (p->kind == DG_GEMM_K_ENDS) {
    const int empty = begin >= end && p->store_empty && p->window_begin == 0;
    return rows > 0 || empty ? dg_gemm_cluster_tiles(p, dg_ceil_div_int(p->m, p->block_m), n_blocks) : 0;
  }
  return rows > 0 ? dg_gemm_cluster_tiles(p, dg_ceil_div_int(rows, p->block_m), n_blocks) : 0;
}

DG_SHARED int dg_gemm_group_end(const dg_gemm_problem* p, const int* layout, int group) {
  return p->kind == DG_GEMM_DENSE ? p->m : layout[group];
}

// The next tile of this CTA, or 0 when there is none. `layout` is the group table (unused when dense); for M_INDEX the per-row one.
DG_SHARED int dg_gemm_next_tile(dg_gemm_cursor* cursor, const dg_gemm_problem* p, const int* layout, dg_gemm_tile* tile) {
  const int n_blocks = dg_ceil_div_int(p->n, p->block_n), t = cursor->next_tile;
  int m_block = 0, n_block = 0;
  cursor->next_tile += cursor->num_clusters;
  tile->k_begin = 0;
  tile->k_end = p->k;
  tile->carry_in = tile->carry_out = 0;
  if (p->kind == DG_GEMM_M_INDEX) {
    const int m_blocks = dg_ceil_div_int(p->m, p->block_m);
    if (t >= dg_gemm_cluster_tiles(p, m_blocks, n_blocks)) return 0;
    dg_gemm_place(p, t, m_blocks, n_blocks, cursor->cta_in_cluster, &m_block, &n_block, &tile->share);
    tile->m_begin = m_block * p->block_m;
    tile->num_rows = dg_min(p->block_m, p->m - tile->m_begin);
    tile->n_begin = n_block * p->block_n;
    tile->group = layout[tile->m_begin];  // -1: a padding block, which every role of both CTAs skips
    if (n_block >= n_blocks) tile->num_rows = 0;
    return 1;
  }
  for (;; cursor->group++) {
    if (cursor->group >= p->num_groups) return 0;
    const int end = dg_gemm_group_end(p, layout, cursor->group);
    const int tiles = dg_gemm_group_tiles(p, cursor->begin, end);
    if (t < cursor->first_tile + tiles) break;
    cursor->first_tile += tiles;
    cursor->begin = p->kind == DG_GEMM_M_MASKED ? 0 : dg_max(cursor->begin, dg_align_int(end, p->alignment));
  }
  const int end = dg_gemm_group_end(p, layout, cursor->group);
  const int low = dg_max(cursor->begin, p->window_begin), high = dg_min(end, p->window_end);
  const int rows_in_window = high - low, rows = p->kind == DG_GEMM_K_ENDS ? p->m : rows_in_window;
  dg_gemm_place(p, t - cursor->first_tile, dg_ceil_div_int(rows, p->block_m), n_blocks, cursor->cta_in_cluster, &m_block, &n_block, &tile->share);
  tile->group = cursor->group;
  tile->n_begin = n_block * p->block_n;
  tile->m_begin = m_block * p->block_m;
  tile->num_rows = n_block < n_blocks ? dg_min(p->block_m, rows - tile->m_begin) : 0;
  if (p->kind == DG_GEMM_K_ENDS) {
    tile->k_begin = rows_in_window > 0 ? low - p->window_begin : 0;
    tile->k_end = tile->k_begin + dg_max(rows_in_window, 0);
    tile->carry_in = cursor->begin < p->window_begin;
    tile->carry_out = rows_in_window > 0 && end > p->window_end;  // a group without rows is stored at once, wherever it lies
  } else {
    tile->m_begin += low - p->window_begin;
  }
  return 1;
}

#endif
