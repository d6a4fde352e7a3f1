"""The memory layout of Mega MoE: regions do not overlap, hold what they must, and do not depend on anything but the settings."""

from __future__ import annotations

import pytest

from deep_gemm import _C
from deep_gemm.mega.buffer import MegaMoeSettings
from deep_gemm.mega.staged.regions import layout_of


def settings(**changes):
    values = {"num_experts": 128, "num_ranks": 8, "num_max_tokens_per_rank": 1000, "num_topk": 8, "hidden": 2048, "intermediate_hidden": 768, "precision": "bf16",
                  "capacity_factor": 1.1, "backend": "cuda"}  # fmt: skip
    return MegaMoeSettings(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_ranks": 1}, {"num_experts": 1, "num_ranks": 1, "num_topk": 1, "num_max_tokens_per_rank": 1}, {"capacity_factor": 0.1}],
)
def test_regions_follow_each_other_aligned_and_without_overlap(changes):
    layout = layout_of(settings(**changes))
    for regions, total in ((layout.symm, layout.symm_bytes), (layout.scratch, layout.scratch_bytes)):
        at = 0
        for offset, nbytes in regions.values():
            assert offset == at and offset % 1024 == 0 and nbytes >= 0
            at += nbytes
        assert at == total


def test_regions_hold_their_tensors():
    s, layout = settings(), layout_of(settings())
    entries, rows = s.num_max_tokens_per_rank * s.num_topk, layout.capacity_rows
    needed = {"signals": 8 * 72, "expert_offsets": 4 * 129, "src_list": 4 * entries, "weights": 4 * entries, "x": 2 * 1000 * 2048, "dy": 2 * 1000 * 2048,
              "combine": 2 * entries * 2048, "dp": 4 * entries}  # fmt: skip
    for name, nbytes in needed.items():
        assert nbytes <= layout.symm[name][1] < nbytes + 1024, name
    needed = {"slot_expert": 4 * entries, "block_counts": 4 * 128 * 4, "group_ends": 4 * 16, "segment_begin": 4 * 128, "row_meta": 16 * rows, "row_dp": 4 * 4 * rows,
              "rows": 4 * rows * 2048, "z": 4 * rows * 768, "act": 2 * rows * 768, "carry13": 16 * 768 * 2048, "carry2": 8 * 768 * 2048,
              "bias_sums": 4 * 16 * (2 * 768 + 2048)}  # fmt: skip
    for name, nbytes in needed.items():
        assert nbytes <= layout.scratch[name][1] < nbytes + 1024, name


@pytest.mark.parametrize("factor", [0.05, 0.5, 1.0, 1.1, 100.0])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_rounds_cover_every_routing(ranks, factor):
    s = settings(num_ranks=ranks, capacity_factor=factor)
    layout = layout_of(s)
    assert layout.capacity_rows % 128 == 0
    assert layout.rounds * layout.capacity_rows >= ranks * 1000 * 8 + 127 * s.num_local_experts  # all entries here, the worst padding
    assert layout.worst_rows <= layout.rounds * layout.capacity_rows < layout.worst_rows + layout.capacity_rows


@pytest.mark.parametrize("factor", [1.0, 1.1, 3.0])
def test_one_rank_needs_one_round_and_no_carry(factor):
    layout = layout_of(settings(num_ranks=1, capacity_factor=factor))
    assert layout.rounds == 1
    assert layout.scratch["carry13"][1] == layout.scratch["carry2"][1] == 0


def test_row_numbers_that_do_not_fit_32_bits_are_refused():
    with pytest.raises(
        ValueError,
        match=r"num_max_tokens_per_rank = 40000000: 8 ranks with num_topk = 8 make up to \d+ rows on one rank; expected fewer than",
    ):
        layout_of(settings(num_max_tokens_per_rank=40_000_000))


def test_too_many_experts_are_refused_by_name():
    with pytest.raises(ValueError, match=r"mega_moe_layout: num_experts = 8192, expected 1\.\.4096"):
        layout_of(settings(num_experts=8192))


def test_row_meta_is_one_16_byte_load_and_control_starts_with_the_epoch():
    assert _C.struct_size("MegaMoeRowMeta") == 16
    assert [row[:3] for row in _C.struct_fields("MegaMoeRowMeta")] == [
        ("source", "i32", 0),
        ("entry", "i32", 4),
        ("expert", "i32", 8),
        ("weight", "f32", 12),
    ]
    assert _C.struct_fields("MegaMoeControl")[0][0] == "epoch"


def test_every_phase_and_fault_has_a_name():
    constants = _C.mega_moe_constants()
    assert constants["phases"] == ("reuse", "forward_publish", "forward_push", "backward_publish", "backward_push")
    assert constants["faults"][0] == "none" and len(set(constants["faults"])) == 5
