"""mega_moe_plan_bytes says what buffers and calls then allocate (slabs, scratch and handed-over tensors of both CUDA backends; the reference's
state), and names a bad setting. Against torch's allocator: tests/gpu/test_memory.py."""

from __future__ import annotations

import math

import pytest
import torch
from api_inputs import E, H, I, K, T, make_buffer, make_inputs
from simt.ranks import Ranks
from staged_case import PLAIN, Case

import deep_gemm
from deep_gemm import mega_moe_plan_bytes
from deep_gemm.mega.fused.backend import FusedBackend
from deep_gemm.mega.staged.backend import StagedBackend

SIZES = (128, 1000, 8, 2048, 768)  # experts, tokens, experts per token, H, I


@pytest.mark.parametrize("num_ranks,capacity_factor", [(1, 1.25), (2, 1.25), (4, 0.25)])
def test_slab_and_scratch_are_what_a_rank_allocates(num_ranks, capacity_factor):
    case = Case(num_ranks, 8, tokens=(37, 300, 5, 0)[:num_ranks])
    ranks = Ranks(None, num_ranks, capacity_factor=capacity_factor, **case.shape)
    plan = mega_moe_plan_bytes(num_ranks, capacity_factor=capacity_factor, **case.shape)
    for buffer, resources in zip(ranks.buffers, ranks.resources, strict=True):
        assert buffer.symm.tensor.nbytes == plan.symmetric
        assert resources.regions.rows.untyped_storage().nbytes() == plan.scratch == plan.buffer - plan.symmetric


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("backend", [StagedBackend, FusedBackend])
def test_saved_and_activations_are_what_a_call_hands_over(backend, save):
    case = Case(2, 8, tokens=(37, 300))
    ranks = Ranks(None, 2, **case.shape)
    problem = ranks.problem(1, case.inputs(1), activation=PLAIN, save=save)  # as many tokens as the buffer's bound
    plan = mega_moe_plan_bytes(2, capacity_factor=1.1, save=save, backend=backend.name, **case.shape)
    assert [2 * math.prod(shape) for shape in object.__new__(backend).fake_shapes(problem)] == [plan.activations, plan.saved]


@pytest.mark.parametrize("save", ["recompute", "preact"])
def test_the_reference_saves_what_its_state_holds(save):
    inputs, buffer = make_inputs(dtype=torch.bfloat16), make_buffer()
    _, state = deep_gemm.mega_moe_fwd(*inputs.args[:2], inputs.topk_weights.float(), *inputs.args[3:], buffer, save=save)
    plan = mega_moe_plan_bytes(1, E, T, K, H, I, save=save, backend="reference")
    assert (plan.buffer, plan.saved) == (buffer.nbytes, state.nbytes)


def test_recompute_saves_nothing_and_more_ranks_cost_a_rank_no_rows():
    plans = [mega_moe_plan_bytes(num_ranks, *SIZES) for num_ranks in (2, 8, 64)]
    assert [plan.saved for plan in plans] == [0, 0, 0]
    assert len({plan.symmetric for plan in plans}) == 1
    rows = [plan.activations for plan in plans]
    assert rows == sorted(rows, reverse=True)  # fewer local experts, less padding


@pytest.mark.parametrize(
    "changes,error,text",
    [
        ({"num_ranks": 0}, ValueError, "num_ranks = 0: expected an int of at least 1"),
        ({"num_ranks": 3}, ValueError, "num_experts = 128: expected a multiple of the number of ranks, 3"),
        ({"hidden": 100}, ValueError, "hidden = 100: expected a multiple of 128 on CUDA; pad to 128"),
        ({"save": "all"}, ValueError, r"save = 'all': expected one of \['recompute', 'preact'\]"),
        ({"backend": "gpu"}, ValueError, "backend = 'gpu': expected None or one of"),
        ({"precision": "fp8"}, NotImplementedError, "precision = 'fp8': backend 'cuda' has no kernels for it"),
    ],
)
def test_a_bad_setting_is_named(changes, error, text):
    names = ("num_experts", "num_max_tokens_per_rank", "num_topk", "hidden", "intermediate_hidden")
    with pytest.raises(error, match=text):
        mega_moe_plan_bytes(**{"num_ranks": 8, **dict(zip(names, SIZES, strict=True)), **changes})
