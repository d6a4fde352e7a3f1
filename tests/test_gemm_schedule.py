"""Walks the tile order that the kernels compile (schedule/gemm_tiles.h) on the host: every element of every result belongs to exactly one
tile, tiles never cross groups, windows cover each group once and hand partial sums on in order, and m-tiles never start off the alignment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_gemm import _C

BLOCK_M, ALIGNMENT = 128, 128
KINDS = _C.gemm_kinds()
NO_WINDOW = (0, 2**31 - 1)


def walk(kind, *, m=0, n, k=64, layout=(), groups=1, window=NO_WINDOW, alignment=ALIGNMENT, store_empty=1, block_n=256, num_ctas=3):
    """All tiles, CTA by CTA."""
    return [
        dict(zip(("group", "m", "rows", "n", "k_begin", "k_end", "carry_in", "carry_out"), tile, strict=True))
        for cta in range(num_ctas)
        for tile in _C.gemm_tiles(
            KINDS[kind], BLOCK_M, block_n, m, n, k, groups, *window, alignment, store_empty, cta, num_ctas, list(layout)
        )
    ]


def begins_of(ends, alignment=ALIGNMENT):
    begins = [0]
    for end in ends[:-1]:
        begins.append(max(begins[-1], -(-end // alignment) * alignment))
    return begins


def ends_of(sizes, alignment=ALIGNMENT):
    ends, begin = [], 0
    for size in sizes:
        ends.append(begin + size)
        begin = -(-ends[-1] // alignment) * alignment
    return ends


def cover(tiles, rows, n, block_n=256):
    count = np.zeros((rows, n), dtype=int)
    for t in tiles:
        count[t["m"] : t["m"] + t["rows"], t["n"] : t["n"] + block_n] += 1
    return count


sizes_st = st.lists(st.integers(0, 700), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 3000), n=st.integers(1, 1200), num_ctas=st.integers(1, 140), block_n=st.sampled_from([128, 256]))
def test_dense_tiles_cover_the_result_once(m, n, num_ctas, block_n):
    tiles = walk("dense", m=m, n=n, num_ctas=num_ctas, block_n=block_n)
    assert (cover(tiles, m, n, block_n) == 1).all()


@settings(max_examples=60, deadline=None)
@given(sizes=sizes_st, n=st.integers(1, 600), num_ctas=st.integers(1, 20))
def test_m_groups_by_ends_cover_their_rows_once_and_nothing_else(sizes, n, num_ctas):
    ends = ends_of(sizes)
    tiles = walk("m_ends", n=n, layout=ends, groups=len(ends), num_ctas=num_ctas)
    count = cover(tiles, ends[-1] + 1, n)
    for g, (begin, end) in enumerate(zip(begins_of(ends), ends, strict=True)):
        assert (count[begin:end] == 1).all()
        count[begin:end] = 0
        assert all(begin <= t["m"] and t["m"] + t["rows"] <= end for t in tiles if t["group"] == g)
    assert not count.any()


@settings(max_examples=60, deadline=None)
@given(sizes=sizes_st, n=st.integers(1, 300), blocks=st.integers(1, 9))
def test_windows_cover_every_row_once_in_pool_coordinates(sizes, n, blocks):
    ends, capacity = ends_of(sizes), blocks * ALIGNMENT
    count = np.zeros((ends[-1] + 1, n), dtype=int)
    for begin in range(0, ends[-1] + capacity, capacity):
        tiles = walk("m_ends", n=n, layout=ends, groups=len(ends), window=(begin, begin + capacity))
        assert all(0 <= t["m"] and t["m"] + t["rows"] <= capacity and t["m"] % ALIGNMENT == 0 for t in tiles)
        part = cover(tiles, capacity, n)
        used = min(capacity, max(0, ends[-1] - begin))
        count[begin : begin + used] += part[:used]
        assert not part[used:].any()
    for begin, end in zip(begins_of(ends), ends, strict=True):
        assert (count[begin:end] == 1).all()


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6), n=st.integers(1, 300))
def test_masked_groups_cover_only_their_rows(sizes, n):
    tiles = walk("m_masked", n=n, layout=sizes, groups=len(sizes), window=(0, 300))
    for g, size in enumerate(sizes):
        count = cover([t for t in tiles if t["group"] == g], 300, n)
        assert (count[:size] == 1).all() and not count[size:].any()


def test_index_layout_skips_padding_blocks():
    layout = [0] * 100 + [-1] * 28 + [-1] * 128 + [2] * 128 + [3] * 1
    tiles = [t for t in walk("m_index", m=len(layout), n=512, layout=layout) if t["rows"]]
    assert sorted({(t["m"], t["group"], t["rows"]) for t in tiles}) == [(0, 0, 128), (256, 2, 128), (384, 3, 1)]
    assert len(tiles) == 3 * 2


@settings(max_examples=80, deadline=None)
@given(sizes=sizes_st, blocks=st.integers(1, 9), accumulate=st.booleans())
def test_k_groups_sum_every_row_once_over_windows_with_matching_carries(sizes, blocks, accumulate):
    m, n, capacity = 200, 300, blocks * ALIGNMENT
    ends = ends_of(sizes)
    seen = {g: [] for g in range(len(sizes))}
    for begin in range(0, max(ends[-1], 1), capacity):
        tiles = walk("k_ends", m=m, n=n, layout=ends, groups=len(ends), window=(begin, begin + capacity), store_empty=not accumulate)
        for g, parts in seen.items():
            mine = [t for t in tiles if t["group"] == g]
            if not mine:
                continue
            assert (cover(mine, m, n) == 1).all()
            ranges = {(t["k_begin"], t["k_end"], t["carry_in"], t["carry_out"]) for t in mine}
            assert len(ranges) == 1
            k_begin, k_end, carry_in, carry_out = ranges.pop()
            assert 0 <= k_begin <= k_end <= capacity
            parts.append((k_begin + begin, k_end + begin, carry_in, carry_out))
    for g, (begin, end) in enumerate(zip(begins_of(ends), ends, strict=True)):
        parts = seen[g]
        if begin == end:
            assert len(parts) == (0 if accumulate else 1)
            continue
        assert parts[0][0] == begin and parts[-1][1] == end
        assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
        assert [p[2] for p in parts] == [0] + [1] * (len(parts) - 1)
        assert [p[3] for p in parts] == [1] * (len(parts) - 1) + [0]


@pytest.mark.parametrize("sizes", [[0, 1, 7, 64, 65, 4095], [5], [0, 0, 0]])
def test_k_groups_without_alignment_start_where_the_previous_ends(sizes):
    ends = list(np.cumsum(sizes))
    tiles = walk("k_ends", m=128, n=128, layout=[int(e) for e in ends], groups=len(sizes), alignment=1, window=(0, int(ends[-1])))
    ranges = {t["group"]: (t["k_begin"], t["k_end"]) for t in tiles}
    assert ranges == {g: (end - size, end) for g, (size, end) in enumerate(zip(sizes, ends, strict=True))}


def test_shared_memory_of_every_configuration_fits_a_cta():
    from deep_gemm.gemm_launch import SMEM_LIMIT, choose_config

    for n in (1, 64, 65, 128, 129, 768, 7168):
        for groups in (1, 32, 33, 256, 1024):
            config = choose_config("m_ends", "k", "k", torch.bfloat16, n, groups)
            assert config.smem_bytes <= SMEM_LIMIT and config.num_stages >= 3 and config.max_groups >= groups
