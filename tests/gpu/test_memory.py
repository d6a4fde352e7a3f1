"""mega_moe_plan_bytes against torch's allocator: what a buffer takes, what a forward keeps and what it takes for a while, to the byte, for one rank and
two virtual ones. What torch counts as requested is compared: what it rounds up to is its own affair."""

from __future__ import annotations

import gc

import pytest
import torch
from moe_support import small, spread, virtual_group

from deep_gemm import mega_moe_plan_bytes
from deep_gemm.testing.moe_cases import Ranks, make_inputs

pytestmark = pytest.mark.gpu


def requested(what: str = "current") -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("capacity_factor", [1.25, 0.25])
@pytest.mark.parametrize("backend", ["cuda", "fused"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_plan_is_what_the_allocator_gives(num_ranks, backend, capacity_factor, save):
    device, tokens = torch.device("cuda", torch.cuda.current_device()), 300
    case = small(tokens=spread(tokens, num_ranks), capacity_factor=capacity_factor, save=save)
    inputs, group = make_inputs(case, device), virtual_group(num_ranks) if num_ranks > 1 else None
    plan = mega_moe_plan_bytes(
        num_ranks, case.num_experts, tokens, case.num_topk, case.hidden, case.intermediate_hidden,
        save=save, capacity_factor=capacity_factor, backend=backend,
    )  # fmt: skip
    gc.collect()
    before = requested()
    ranks = Ranks(case, inputs, device, group, backend)
    joined = (ranks.inputs.x, ranks.inputs.topk_idx, ranks.inputs.topk_weights, ranks.inputs.dy) if group is None else ()
    assert requested() - before == num_ranks * plan.buffer + sum(t.nbytes for tensors in joined for t in tensors)  # one rank gets copies
    ranks.forward()  # loads what is loaded at the first call

    gc.collect()
    before = requested()
    torch.cuda.reset_peak_memory_stats()
    results = ranks.forward()
    kept = sum(y.nbytes for y, _ in results) + num_ranks * plan.saved
    assert requested() - before == kept
    assert requested("peak") - before == kept + plan.activations  # the ranks' calls are made one after another
    for buffer in ranks.buffers:
        buffer.destroy()
