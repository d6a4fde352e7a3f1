"""Walks the order of work of the one-launch directions (schedule/mega_moe_tiles.h) on the host: every tile of every step exactly once, rounds over
disjoint rows, and no way for CTAs that work through their tiles in order to wait for each other for ever."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from deep_gemm import _C

STEPS = _C.mega_moe_steps()
FIELDS = (
    "step",
    "round",
    "block",
    "block_rows",
    "group",
    "m_begin",
    "num_rows",
    "n_begin",
    "k_begin",
    "k_end",
    "carry",
    "share",
    "k_before",
)
ALIGN, BLOCK_N, K_BLOCK = 128, 192, 64
DX, DW2, DW13 = 1, 2, 4


def blocks_of(n, block):
    return -(-n // block)


def walk(rows, *, backward=False, wanted=7, saved=0, accumulate=0, width, hidden, capacity, unit=1024, lag=16, ctas=6, cluster=1, band=8):
    """(group ends, tiles of each CTA)."""
    ends, at = [], 0
    for count in rows:
        ends.append(at + count)
        at = blocks_of(at + count, ALIGN) * ALIGN
    shape = (int(backward), wanted, saved, accumulate, BLOCK_N, cluster, band, width, hidden, capacity, unit, lag)
    walked = [[dict(zip(FIELDS, tile, strict=True)) for tile in _C.mega_moe_tiles(*shape, cta, ctas, ends)] for cta in range(ctas)]
    for tile in (tile for cta in walked for tile in cta):
        tile["step"] = STEPS[tile["step"]]
    return ends, walked


def chain(backward, wanted, width, hidden):
    """(step, columns, block_n, k) of the steps over rows, in order."""
    gemm1 = ("gemm1", width, BLOCK_N // 2, hidden)
    if not backward:
        return [gemm1, ("gemm2", hidden, BLOCK_N, width)]
    dgrad1 = [("dgrad1", hidden, BLOCK_N, 2 * blocks_of(width, K_BLOCK) * K_BLOCK)] if wanted & DX else []
    return [gemm1, ("dgrad2", width, BLOCK_N, hidden), *dgrad1]


def expected_rows(ends, steps, saved, capacity):
    """{(step, row block, first column): (group, rows, round, row in the pool)}."""
    expected, begin = {}, 0
    for group, end in enumerate(ends):
        for first in range(begin, end, ALIGN):
            for number, (step, columns, block_n, _) in enumerate(steps):
                if number == 0 and first // capacity < saved:
                    continue
                for n in range(0, columns, block_n):
                    expected[step, first // ALIGN, n] = (group, min(ALIGN, end - first), first // capacity, first % capacity)
        begin = max(begin, blocks_of(end, ALIGN) * ALIGN)
    return expected


def expected_groups(ends, wanted, accumulate, width, hidden, capacity):
    """{(step, round, group, first row, first column): (first row and end of the contraction in the pool, carry)}."""
    expected, begin = {}, 0
    steps = [("wgrad2", hidden, width)] if wanted & DW2 else []
    steps += [("wgrad_gate", width, hidden), ("wgrad_up", width, hidden)] if wanted & DW13 else []
    for group, end in enumerate(ends):
        windows = range(begin // capacity, blocks_of(end, capacity)) if end > begin else [] if accumulate else [0]
        for number in windows:
            low, high = max(begin, number * capacity), min(end, (number + 1) * capacity)
            k = (low - number * capacity, high - number * capacity) if end > begin else (0, 0)
            carry = 0 if end <= begin else (begin < number * capacity) | (end > (number + 1) * capacity) << 1
            for step, m, n in steps:
                for first in range(0, m, ALIGN):
                    expected.update({(step, number, group, first, column): (*k, carry) for column in range(0, n, BLOCK_N)})
        begin = max(begin, blocks_of(end, ALIGN) * ALIGN)
    return expected


def check_cover(walked, rows, groups, steps):
    k_of = {step: k for step, _, _, k in steps}
    seen_rows, seen_groups = {}, {}
    for tile in (tile for cta in walked for tile in cta if tile["step"] != "round_end" and tile["num_rows"]):
        if tile["step"] in k_of:
            key, value = (tile["step"], tile["block"], tile["n_begin"]), (tile["group"], tile["num_rows"], tile["round"], tile["m_begin"])
            assert (tile["k_begin"], tile["k_end"], tile["block_rows"]) == (0, k_of[tile["step"]], tile["num_rows"])
            seen = seen_rows
        else:
            key = (tile["step"], tile["round"], tile["group"], tile["m_begin"], tile["n_begin"])
            value, seen = (tile["k_begin"], tile["k_end"], tile["carry"]), seen_groups
        assert key not in seen
        seen[key] = value
    assert seen_rows == rows and seen_groups == groups


def check_rounds(walked):
    """Every CTA passes the end of every round but the last once, and has only tiles of that round before it; its ring's place adds up."""
    last = max((tile["round"] for cta in walked for tile in cta), default=0)
    for cta in walked:
        marks = [tile["round"] for tile in cta if tile["step"] == "round_end"]
        assert marks == list(range(len(marks))) and len(marks) >= last
        number = k_blocks = 0
        for tile in cta:
            assert tile["round"] == number
            number += tile["step"] == "round_end"
            if tile["step"] != "round_end":
                assert tile["k_before"] == k_blocks
                k_blocks += max(1, blocks_of(tile["k_end"] - tile["k_begin"], K_BLOCK))


def check_progress(walked, steps, saved):
    """Runs the CTAs against each other, last first: a tile over rows waits for all tiles of its rows of the step before, a tile over a group for all
    that the round's rows were, rows of a round for the end of the one before in every CTA. What can run never depends on luck, so one
    order that ends shows that all do."""
    at, done, ended = [0] * len(walked), defaultdict(int), defaultdict(int)
    columns = {step: blocks_of(n, block_n) for step, n, block_n, _ in steps}
    before = {step: steps[i - 1][0] for i, (step, *_) in enumerate(steps) if i > 0}
    made = "dgrad2" if "dgrad2" in columns else None
    total = 0

    def ready(tile):
        if tile["step"] == "round_end":
            return True
        if tile["round"] > 0 and ended[tile["round"] - 1] < len(walked):
            return False
        if tile["step"] not in columns:
            return total >= tile["block"] * columns[made]
        needed = before.get(tile["step"])
        saves = needed == steps[0][0] and tile["round"] < saved
        return needed is None or saves or not tile["num_rows"] or done[needed, tile["block"]] == columns[needed]

    moved = True
    while moved:
        moved = False
        for cta in reversed(range(len(walked))):
            while at[cta] < len(walked[cta]) and ready(tile := walked[cta][at[cta]]):
                done[tile["step"], tile["block"]] += tile["num_rows"] > 0
                total += tile["step"] == made and tile["num_rows"] > 0
                ended[tile["round"]] += tile["step"] == "round_end"
                at[cta], moved = at[cta] + 1, True
    assert at == [len(cta) for cta in walked], [cta[i] for cta, i in zip(walked, at, strict=True) if i < len(cta)]


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.sampled_from([0, 1, 64, 127, 128, 129, 300, 1000, 2500]), min_size=1, max_size=12),
    backward=st.booleans(),
    wanted=st.integers(0, 7),
    saved=st.integers(0, 1),
    accumulate=st.integers(0, 1),
    width=st.sampled_from([128, 192, 256, 768]),
    hidden=st.sampled_from([128, 512, 640]),
    capacity=st.sampled_from([128, 384, 1024, 1 << 20]),
    unit=st.sampled_from([128, 512, 1024]),
    lag=st.sampled_from([0, 1, 7, 40]),
    clusters=st.integers(1, 7),
    cluster=st.sampled_from([1, 2]),
    band=st.sampled_from([1, 3, 8]),
)
@example(rows=[0, 0], backward=True, wanted=7, saved=0, accumulate=0, width=128, hidden=128, capacity=128, unit=128, lag=0, clusters=2, cluster=2, band=1)  # fmt: skip
def test_every_tile_once_and_nobody_waits_for_ever(
    rows, backward, wanted, saved, accumulate, width, hidden, capacity, unit, lag, clusters, cluster, band
):
    saved = saved if backward else 0
    ends, walked = walk(
        rows, backward=backward, wanted=wanted, saved=saved, accumulate=accumulate, width=width, hidden=hidden, capacity=capacity, unit=unit,
        lag=lag, ctas=clusters * cluster, cluster=cluster, band=band,
    )  # fmt: skip
    steps = chain(backward, wanted, width, hidden)
    groups = expected_groups(ends, wanted, accumulate, width, hidden, capacity) if backward else {}
    check_cover(walked, expected_rows(ends, steps, saved, capacity), groups, steps)
    check_rounds(walked)
    check_progress(walked, steps, saved)
    for first in range(0, len(walked), cluster):  # the CTAs of a cluster go through the same units together
        assert len({tuple((tile["step"], tile["round"], tile["group"]) for tile in cta) for cta in walked[first : first + cluster]}) == 1


def test_a_step_keeps_its_distance():
    """Between a step's tiles of some rows and the next step's tiles of them lie at least `lag` others of the step, as long as there are any."""
    lag, ctas = 20, 4
    for backward, names in ((False, ("gemm1", "gemm2")), (True, ("gemm1", "dgrad2", "dgrad1"))):
        _, walked = walk([1024] * 8, backward=backward, width=768, hidden=512, capacity=1 << 20, unit=1024, lag=lag, ctas=ctas)
        order = [tile for step in zip(*(cta + [None] * 999 for cta in walked)) for tile in step if tile]  # tiles by number
        for earlier, later in pairwise(names):
            last = {tile["group"]: number for number, tile in enumerate(order) if tile["step"] == earlier}
            first = {}
            for number, tile in enumerate(order):
                if tile["step"] == later:
                    first.setdefault(tile["group"], number)
            groups = range(8 - 1 - (earlier != "gemm1"))
            assert all(sum(tile["step"] == earlier for tile in order[last[g] + 1 : first[g]]) >= lag for g in groups), (earlier, later)
