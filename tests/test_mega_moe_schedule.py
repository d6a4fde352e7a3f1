"""Walks the order of work of the one-launch forward (schedule/mega_moe_tiles.h) on the host: every tile of both GEMMs exactly once, rounds over
disjoint rows, and no way for CTAs that work through their tiles in order to wait for each other for ever."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import example, given, settings
from hypothesis import strategies as st

from deep_gemm import _C

GEMM1, GEMM2, ROUND_END = range(3)
FIELDS = ("step", "round", "block", "group", "m_begin", "num_rows", "n_begin", "k", "share")
ALIGN = 128


def walk(rows, *, width, hidden, capacity, unit=1024, lag=16, ctas=6, cluster=1, band=8, block_n1=96, block_n2=192):
    """(group ends, steps of each CTA)."""
    ends, at = [], 0
    for count in rows:
        ends.append(at + count)
        at = -(-(at + count) // ALIGN) * ALIGN
    shape = (block_n1, block_n2, cluster, band, width, hidden, capacity, unit, lag)
    return ends, [[dict(zip(FIELDS, tile, strict=True)) for tile in _C.mega_moe_tiles(*shape, cta, ctas, ends)] for cta in range(ctas)]


def check_cover(rows, ends, steps, width, hidden, capacity):
    """Each (row block, column block) of each GEMM once, with the rows that exist, in the round that holds them."""
    expected, begin = {}, 0
    for group, end in enumerate(ends):
        for first in range(begin, end, ALIGN):
            for step, columns, block_n in ((GEMM1, width, 96), (GEMM2, hidden, 192)):
                for n in range(0, columns, block_n):
                    expected[step, first // ALIGN, n] = (group, min(ALIGN, end - first), first // capacity, first % capacity)
        begin = max(begin, -(-end // ALIGN) * ALIGN)
    seen = {}
    for tile in (tile for cta in steps for tile in cta if tile["step"] != ROUND_END and tile["num_rows"]):
        key = (tile["step"], tile["block"], tile["n_begin"])
        assert key not in seen
        seen[key] = (tile["group"], tile["num_rows"], tile["round"], tile["m_begin"])
        assert tile["k"] == (hidden if tile["step"] == GEMM1 else width)
    assert seen == expected


def check_rounds(steps):
    """Every CTA passes the end of every round but the last once, and has only tiles of that round before it."""
    last = max((tile["round"] for cta in steps for tile in cta), default=0)
    for cta in steps:
        marks = [tile["round"] for tile in cta if tile["step"] == ROUND_END]
        assert marks == list(range(len(marks))) and len(marks) >= last
        number = 0
        for tile in cta:
            assert tile["round"] == number
            number += tile["step"] == ROUND_END


def check_progress(steps, columns):
    """Runs the CTAs against each other, last first: a GEMM 2 tile waits for all GEMM 1 tiles of its rows, rows of a round for the end of the one
    before in every CTA. What can run never depends on luck, so one order that ends shows that all do."""
    at, done, ended = [0] * len(steps), defaultdict(int), defaultdict(int)

    def ready(tile):
        if tile["step"] == GEMM2 and tile["num_rows"]:
            return done[tile["block"]] == columns
        return tile["step"] == ROUND_END or tile["round"] == 0 or ended[tile["round"] - 1] == len(steps)

    moved = True
    while moved:
        moved = False
        for cta in reversed(range(len(steps))):
            while at[cta] < len(steps[cta]) and ready(tile := steps[cta][at[cta]]):
                done[tile["block"]] += tile["step"] == GEMM1 and tile["num_rows"] > 0
                ended[tile["round"]] += tile["step"] == ROUND_END
                at[cta], moved = at[cta] + 1, True
    assert at == [len(cta) for cta in steps], [cta[i] for cta, i in zip(steps, at, strict=True) if i < len(cta)]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.sampled_from([0, 1, 64, 127, 128, 129, 300, 1000, 2500]), min_size=1, max_size=12),
    width=st.sampled_from([128, 256, 768]),
    hidden=st.sampled_from([128, 512, 640]),
    capacity=st.sampled_from([128, 384, 1024, 1 << 20]),
    unit=st.sampled_from([128, 512, 1024]),
    lag=st.sampled_from([0, 1, 7, 40]),
    clusters=st.integers(1, 7),
    cluster=st.sampled_from([1, 2]),
    band=st.sampled_from([1, 3, 8]),
)
@example(rows=[0, 0], width=128, hidden=128, capacity=128, unit=128, lag=0, clusters=2, cluster=2, band=1)
def test_every_tile_once_and_nobody_waits_for_ever(rows, width, hidden, capacity, unit, lag, clusters, cluster, band):
    ends, steps = walk(
        rows, width=width, hidden=hidden, capacity=capacity, unit=unit, lag=lag, ctas=clusters * cluster, cluster=cluster, band=band
    )
    check_cover(rows, ends, steps, width, hidden, capacity)
    check_rounds(steps)
    check_progress(steps, -(-width // 96))
    for first in range(0, len(steps), cluster):  # the CTAs of a cluster go through the same units together
        assert len({tuple((tile["step"], tile["round"], tile["group"]) for tile in cta) for cta in steps[first : first + cluster]}) == 1


def test_gemm2_keeps_its_distance():
    """Between the GEMM 1 tiles of some rows and their GEMM 2 lie at least `lag` others, as long as there are any."""
    lag, ctas = 20, 4
    _, steps = walk([1024] * 8, width=768, hidden=512, capacity=1 << 20, unit=1024, lag=lag, ctas=ctas)
    order = [tile for step in zip(*(cta + [None] * 99 for cta in steps)) for tile in step if tile]  # tiles by number
    last = {tile["group"]: number for number, tile in enumerate(order) if tile["step"] == GEMM1}
    first = {}
    for number, tile in enumerate(order):
        if tile["step"] == GEMM2:
            first.setdefault(tile["group"], number)
    assert all(sum(tile["step"] == GEMM1 for tile in order[last[group] + 1 : first[group]]) >= lag for group in range(7))
