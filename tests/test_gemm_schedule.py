"""Walks the tile order that the kernels compile (schedule/gemm_tiles.h) on the host: every element of every result belongs to exactly one
tile, tiles never cross groups, windows cover each group once and hand partial sums on in order, and m-tiles never start off the alignment."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deep_gemm import _C

BLOCK_M, ALIGNMENT = 128, 128
KINDS = _C.gemm_kinds()
NO_WINDOW = (0, 2**31 - 1)


FIELDS = ("group", "m", "rows", "n", "k_begin", "k_end", "carry_in", "carry_out", "share")
SHARE_NONE, SHARE_A, SHARE_B = 0, 1, 2


def walk(
    kind, *, m=0, n, k=64, layout=(), groups=1, window=NO_WINDOW, alignment=ALIGNMENT, store_empty=1, block_n=256, clusters=3, cluster=2, band=8
):
    """All tiles, CTA by CTA, after a look at what the CTAs of each cluster share."""
    num_ctas = clusters * cluster
    ctas = [
        [
            dict(zip(FIELDS, tile, strict=True))
            for tile in _C.gemm_tiles(
                KINDS[kind], BLOCK_M, block_n, cluster, band, m, n, k, groups, *window, alignment, store_empty, cta, num_ctas, list(layout)
            )
        ]
        for cta in range(num_ctas)
    ]
    for first in range(0, num_ctas, cluster):
        check_sharing(ctas[first : first + cluster])
    return [tile for tiles in ctas for tile in tiles]


def check_sharing(ctas):
    """The load threads multicast halves of the shared tile and wait for each other's stages: same steps, same group and k, same shared block."""
    assert len({len(tiles) for tiles in ctas}) == 1
    for step in zip(*ctas, strict=True):
        assert len({(t["group"], t["k_begin"], t["k_end"], t["share"]) for t in step}) == 1
        if len(step) == 1:
            assert step[0]["share"] == SHARE_NONE
        else:
            assert len({t["m"] for t in step if step[0]["share"] == SHARE_A} | {t["n"] for t in step if step[0]["share"] == SHARE_B}) == 1
            assert step[0]["share"] in (SHARE_A, SHARE_B) and step[0] != step[1]


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
@given(m=st.integers(1, 3000), n=st.integers(1, 1200), clusters=st.integers(1, 70), cluster=st.integers(1, 2), block_n=st.sampled_from([96, 128, 192, 256]), band=st.integers(1, 20))
def test_dense_tiles_cover_the_result_once(m, n, clusters, cluster, block_n, band):
    tiles = walk("dense", m=m, n=n, clusters=clusters, cluster=cluster, block_n=block_n, band=band)
    assert (cover(tiles, m, n, block_n) == 1).all()


@settings(max_examples=60, deadline=None)
@given(sizes=sizes_st, n=st.integers(1, 600), clusters=st.integers(1, 20), cluster=st.integers(1, 2))
def test_m_groups_by_ends_cover_their_rows_once_and_nothing_else(sizes, n, clusters, cluster):
    ends = ends_of(sizes)
    tiles = walk("m_ends", n=n, layout=ends, groups=len(ends), clusters=clusters, cluster=cluster)
    count = cover(tiles, ends[-1] + 1, n)
    for g, (begin, end) in enumerate(zip(begins_of(ends), ends, strict=True)):
        assert (count[begin:end] == 1).all()
        count[begin:end] = 0
        assert all(begin <= t["m"] and t["m"] + t["rows"] <= end for t in tiles if t["group"] == g)
    assert not count.any()


@settings(max_examples=60, deadline=None)
@given(sizes=sizes_st, n=st.integers(1, 600), blocks=st.integers(1, 9), cluster=st.integers(1, 2))
def test_windows_cover_every_row_once_in_pool_coordinates(sizes, n, blocks, cluster):
    ends, capacity = ends_of(sizes), blocks * ALIGNMENT
    count = np.zeros((ends[-1] + 1, n), dtype=int)
    for begin in range(0, ends[-1] + capacity, capacity):
        tiles = walk("m_ends", n=n, layout=ends, groups=len(ends), window=(begin, begin + capacity), cluster=cluster)
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
    tiles = [t for t in walk("m_index", m=len(layout), n=512, layout=layout, cluster=1) if t["group"] >= 0]
    assert sorted({(t["m"], t["group"], t["rows"]) for t in tiles}) == [(0, 0, 128), (256, 2, 128), (384, 3, 1)]
    assert len(tiles) == 3 * 2


@settings(max_examples=80, deadline=None)
@given(sizes=sizes_st, blocks=st.integers(1, 9), accumulate=st.booleans(), cluster=st.integers(1, 2))
@example(sizes=[129, 0], blocks=1, accumulate=False, cluster=1)  # the empty group lies past the first window, which stores its zeros
def test_k_groups_sum_every_row_once_over_windows_with_matching_carries(sizes, blocks, accumulate, cluster):
    m, n, capacity = 300, 300, blocks * ALIGNMENT
    ends = ends_of(sizes)
    seen = {g: [] for g in range(len(sizes))}
    for begin in range(0, max(ends[-1], 1), capacity):
        tiles = walk("k_ends", m=m, n=n, layout=ends, groups=len(ends), window=(begin, begin + capacity), store_empty=not accumulate, cluster=cluster)
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
            assert [p[2:] for p in parts] == ([] if accumulate else [(0, 0)]), "zeros go to the result, not to the carry"
            continue
        assert parts[0][0] == begin and parts[-1][1] == end
        assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
        assert [p[2] for p in parts] == [0] + [1] * (len(parts) - 1)
        assert [p[3] for p in parts] == [1] * (len(parts) - 1) + [0]


def test_index_layout_shares_rows_only_as_neighbouring_row_blocks_may_differ_in_group():
    layout = [0] * 128 + [1] * 256
    tiles = walk("m_index", m=len(layout), n=768, layout=layout, groups=2)
    assert (cover(tiles, len(layout), 768) == 1).all() and {t["share"] for t in tiles} == {SHARE_A}


@pytest.mark.parametrize("sizes", [[0, 1, 7, 64, 65, 4095], [5], [0, 0, 0]])
def test_k_groups_without_alignment_start_where_the_previous_ends(sizes):
    ends = list(np.cumsum(sizes))
    tiles = walk("k_ends", m=128, n=128, layout=[int(e) for e in ends], groups=len(sizes), alignment=1, window=(0, int(ends[-1])))
    ranges = {t["group"]: (t["k_begin"], t["k_end"]) for t in tiles}
    assert ranges == {g: (end - size, end) for g, (size, end) in enumerate(zip(sizes, ends, strict=True))}
