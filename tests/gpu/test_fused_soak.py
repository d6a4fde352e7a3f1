"""The forward in one launch for some seconds at a stretch: random tokens and routing, and random orders beside collectives and SM-filling kernels,
where nothing may hang and no bit may change. That the second of these would see a dead-lock is shown without the reserve. For minutes: soak.py."""

from __future__ import annotations

import time

import pytest
import soak
import torch
from moe_support import small, spread
from neighbours import RESERVE_BYTES, Neighbours, StandIns, make_streams

from deep_gemm.testing import VirtualGroup, assert_bitwise_equal
from deep_gemm.testing.moe_cases import Ranks, make_inputs

pytestmark = pytest.mark.gpu
SECONDS = 20


def check(step: soak.Step, rehearsal: bool) -> None:
    record = soak.Record("", seconds=1 if rehearsal else SECONDS)
    record.run(step)
    assert record.steps and not record.faults, "\n".join(record.faults)


def test_random_tokens_and_routing(device, rehearsal):
    check(soak.RandomRouting(soak.World(8, device, rehearsal)), rehearsal)


def test_beside_collectives_and_kernels_that_fill_the_device(device, rehearsal):
    check(Neighbours(soak.World(4, device, rehearsal)), rehearsal)


@pytest.mark.parametrize("what", ["routing", "neighbours"])
def test_in_processes(what, rehearsal):
    if not rehearsal and torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, this machine shows {torch.cuda.device_count()}")
    mode = ["--on-cpu", "--seconds", "1"] if rehearsal else ["--seconds", str(SECONDS)]
    assert soak.main([what, "--processes", *mode]) == 0


def test_without_the_reserve_the_same_kernels_wait_for_each_other():
    """Ranks 0 to 2 wait for rank 3, of which not all CTAs find an SM because the collective of rank 0 has some, and the collectives of the others,
    for which it waits, find none. It gives up after 2 s, then all goes on."""
    device, num_ranks = torch.device("cuda", torch.cuda.current_device()), 4
    total = torch.cuda.get_device_properties(device).multi_processor_count
    group = VirtualGroup(num_ranks, num_sms_per_rank=total // num_ranks, reserve_bytes=RESERVE_BYTES)
    case = small(tokens=spread(150, num_ranks))
    ranks, collectives = Ranks(case, make_inputs(case, device), device, group, "fused"), StandIns(group, limit_s=2)
    streams = make_streams(ranks)

    def collective(rank: int) -> None:
        with torch.cuda.stream(streams["collective", rank]):
            collectives.call(rank, 10)

    expected = [y for y, _ in ranks.forward()]
    for rank in range(num_ranks):
        collective(rank)
    torch.cuda.synchronize()
    assert collectives.late == 0
    collective(0)
    time.sleep(0.02)  # so that it has its SMs
    results = ranks.forward()
    time.sleep(0.02)
    for rank in range(1, num_ranks):
        collective(rank)
    torch.cuda.synchronize()
    assert collectives.late > 0
    for (y, _), alone, buffer in zip(results, expected, ranks.buffers, strict=True):
        assert_bitwise_equal(y, alone, name="y")
        buffer.destroy()
