"""Mega MoE calls beside what trainers run at the same time: collectives, some of which wait for one another across the ranks, and kernels that fill
the device, all in random order. No order may end in a wait for ever, and no result may change.

On one GPU the collectives are a stand-in for NCCL's: RESERVED_SMS CTAs a rank, each on an SM of its own for the whole kernel, that wait for those of
all other ranks. With a process per GPU they are NCCL's own. Virtual ranks start CTA by CTA, so they get so few SMs that all CTAs fit beside each other,
wherever those of the collectives lie; a rank with a GPU of its own has the reserve, and a launch that starts whole or not at all.

Not a test module: soak.py and test_fused_soak.py use it.
"""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from moe_support import spread

import deep_gemm
from deep_gemm import _C, jit
from deep_gemm.mega.fused.backend import RESERVED_SMS
from deep_gemm.testing import VirtualGroup, assert_bitwise_equal
from deep_gemm.testing.moe_cases import MoeCase, Ranks, make_inputs

if TYPE_CHECKING:
    from soak import World

COLLECTIVE_LIMIT_S = 8  # less than DG_TIMEOUT_S of the suite, so that a dead-lock is told by the collective and harms no call
TRANSFER_US = (10, 400)  # that a stand-in stays after all have come
RESERVE_BYTES = 64 << 20
FILLER_SIZE = 4096  # of a square matrix product: some hundred CTAs, 0.2 ms on the whole device

_SOURCE = """
#include <deep_gemm/layout/example_params.h>

namespace stand_in {
using namespace deep_gemm;

// CTA i waits for CTA i of every rank, then for row_stride nanoseconds. d: u32 [CTAs] of arrivals since the words were made, then the number of waits
// that took longer than Config::kLimitS. epoch: arrivals of this and all earlier collectives of all ranks.
template <class Config>
__device__ void collective(const ExampleParams& params) {
  unsigned* arrived = reinterpret_cast<unsigned*>(params.d) + blockIdx.x;
  if (threadIdx.x == 0) {
    ptx::atom_acq_rel_gpu_add_u32(arrived, 1);
    const ptx::u64 start = ptx::globaltimer_ns();
    while (static_cast<int>(ptx::ld_acquire_gpu_u32(arrived) - static_cast<unsigned>(params.epoch)) < 0) {
      if (ptx::globaltimer_ns() - start > Config::kLimitS * 1000000000ull) {
        ptx::atom_acq_rel_gpu_add_u32(reinterpret_cast<unsigned*>(params.d) + gridDim.x, 1);
        break;
      }
      __nanosleep(100);
    }
    const ptx::u64 end = ptx::globaltimer_ns() + params.row_stride;
    while (ptx::globaltimer_ns() < end) __nanosleep(100);
  }
  __syncthreads();
}
}  // namespace stand_in
"""


class CollectiveSpec(jit.KernelSpec):
    """A kernel whose source is here: it is no part of the package."""

    def _generate(self) -> str:
        return super()._generate().replace("\nstruct Config", f"{_SOURCE}\nstruct Config", 1)


def collective_spec(limit_s: int = COLLECTIVE_LIMIT_S) -> jit.KernelSpec:
    return CollectiveSpec(
        name="stand_in_collective",
        header="deep_gemm/ptx/memory.cuh",
        entry="stand_in::collective",
        params="ExampleParams",
        config={"kLimitS": limit_s},
        threads=512,
        arch="sm_90a",
    )


def sms_of_rank(total: int, num_ranks: int) -> int:
    """SMs for the GEMMs of a virtual rank: a collective's CTA takes an SM and may split the pair that a cluster of two CTAs needs."""
    left = total // num_ranks - 2 * RESERVED_SMS
    if left < 2:
        raise ValueError(
            f"num_ranks = {num_ranks}: expected at most {total // (2 * RESERVED_SMS + 2)} virtual ranks beside collectives on {total} SMs"
        )
    return left


class StandIns:
    """Collectives of virtual ranks. Those of a rank come one after another, on one stream."""

    def __init__(self, group: VirtualGroup, ctas: int = RESERVED_SMS, limit_s: int = COLLECTIVE_LIMIT_S):
        self._kernel = jit.load(collective_spec(limit_s), group.device.index)
        self._words = torch.zeros(ctas + 1, dtype=torch.int32, device=group.device)
        self._ctas, self._num_ranks, self._calls = ctas, group.size, [0] * group.size

    def call(self, rank: int, microseconds: float) -> None:
        self._calls[rank] += 1
        params = pack_collective(self._words.data_ptr(), self._num_ranks * self._calls[rank], microseconds)
        smem_bytes = self._kernel.max_dynamic_smem_bytes  # so that a CTA has its SM for itself
        self._kernel.launch(params, self._ctas, smem_bytes, torch.cuda.current_stream().cuda_stream)

    @property
    def late(self) -> int:
        """CTAs so far that did not see their peers come."""
        return int(self._words[-1])

    def check(self) -> None:
        assert self.late == 0, f"{self.late} CTAs of collectives waited {COLLECTIVE_LIMIT_S} s for their peers: a dead-lock"


def pack_collective(words: int, expected: int, microseconds: float) -> bytes:
    return _C.pack(
        "ExampleParams",
        num_rows=0,
        a=bytes(128),
        d=words,
        scale=0.0,
        symm=[],
        flags=0,
        row_stride=int(1e3 * microseconds),
        epoch=expected,
    )


class ProcessCollectives:
    """All-gathers and reduce-scatters of this process's rank in turn: NCCL, or gloo in a rehearsal."""

    def __init__(self, world: World):
        self._size, self._rank = world.num_ranks, world.process.rank
        options = {"device": world.device, "dtype": torch.float32}
        self._part = torch.full((1 << 20,), float(self._rank), **options)
        self._whole = torch.empty(self._size << 20, **options)
        self._ones = torch.ones(self._size << 20, **options)
        self._sum = torch.empty(1 << 20, **options)
        self._calls = 0

    def call(self, rank: int, microseconds: float) -> None:
        self._calls += 1
        if self._calls % 2:
            self._whole.fill_(torch.nan)
            dist.all_gather_into_tensor(self._whole, self._part)
        else:
            self._sum.fill_(torch.nan)
            dist.reduce_scatter_tensor(self._sum, self._ones)

    def check(self) -> None:
        if self._calls >= 2:
            expected = torch.arange(self._size, device=self._whole.device).repeat_interleave(1 << 20)
            assert torch.equal(self._whole, expected.float()), "an all-gather is wrong"
            assert (self._sum == self._size).all(), "a reduce-scatter is wrong"


class NoCollectives:
    """A rehearsal of virtual ranks: one rank, on the CPU."""

    def call(self, rank: int, microseconds: float) -> None:
        pass

    def check(self) -> None:
        pass


class Neighbours:
    """A step: on every rank some Mega MoE calls, collectives and fillers, each kind on a stream of its own, launched in random order."""

    def __init__(self, world: World, seed: int = 0):
        self.world, self.choose = world, random.Random(seed)  # the same on every process: what is called
        case = world.case(MoeCase.of_model("qwen3-30b", spread(256, world.num_ranks), routing="zipf1", num_experts=64))
        self.ranks, self.collectives = self._place(case)
        # The order of launches is each process's own. gloo waits at the call, so there every process must keep to one order.
        self.order = self.choose if world.rehearsal else random.Random(seed + 1 + self.ranks.here[0])
        self.on_gpu = world.device.type == "cuda"
        self.streams = make_streams(self.ranks) if self.on_gpu else {}
        self.calls = {rank: self.ranks.arguments(rank) for rank in self.ranks.here}
        self.targets = {rank: self.ranks.targets(rank) for rank in self.ranks.here}
        side = FILLER_SIZE if self.on_gpu else 16
        self.factors = torch.randn(2, side, side, device=world.device).to(torch.bfloat16)
        self.product = torch.empty_like(self.factors[0])
        self.expected: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._warm_up()

    def _place(self, case: MoeCase) -> tuple[Ranks, object]:
        world = self.world
        if world.process:
            return world.make(case), ProcessCollectives(world)
        if world.rehearsal:
            return world.make(case), NoCollectives()
        total = torch.cuda.get_device_properties(world.device).multi_processor_count
        group = VirtualGroup(world.num_ranks, num_sms_per_rank=sms_of_rank(total, world.num_ranks), reserve_bytes=RESERVE_BYTES)
        return Ranks(case, make_inputs(case, world.device), world.device, group, "fused"), StandIns(group)

    def _warm_up(self) -> None:
        """Each call alone: what it results in; kernels loaded, workspaces made, the ranks of NCCL connected, all of which may wait for the device."""
        made: dict[int, list] = {rank: [] for rank in self.ranks.here}
        for rank in self.ranks.here:
            self._moe(rank, made, backward=True)
        self._wait()
        self.expected = {rank: (y.clone(), dx.clone()) for rank, [(y, dx)] in made.items()}
        for _ in range(2):  # both kinds
            for rank in self.ranks.here:
                self._collective(rank)
        self._filler()
        self._wait()

    def __call__(self, step: int) -> None:
        choose, made = self.choose, {rank: [] for rank in self.ranks.here}
        moes, collectives, fillers, backward = choose.randint(1, 3), choose.randint(1, 4), choose.randint(0, 3), choose.random() < 0.5
        launches = [self._filler] * fillers
        for rank in self.ranks.here:
            launches += [lambda rank=rank: self._moe(rank, made, backward)] * moes + [
                lambda rank=rank: self._collective(rank)
            ] * collectives
        self.order.shuffle(launches)
        if self.on_gpu and choose.random() < 0.5:
            self._close_gate()
        for launch in launches:
            launch()
        self._wait()
        self.collectives.check()
        for rank in self.ranks.here:
            self.ranks.buffers[rank].check()
            for results in made[rank]:  # y, or y and dx
                for name, actual, expected in zip(("y", "dx"), results, self.expected[rank], strict=False):
                    assert_bitwise_equal(actual, expected, name=f"{name} of rank {rank}")

    def _on(self, *name: object):
        return torch.cuda.stream(self.streams[name]) if self.streams else contextlib.nullcontext()

    def _moe(self, rank: int, made: dict[int, list], backward: bool) -> None:
        with self._on("moe", rank):
            y, state = deep_gemm.mega_moe_fwd(*self.calls[rank], backend=self.world.backends[0])
            made[rank].append((y, deep_gemm.mega_moe_bwd(self.ranks.inputs.dy[rank], state, **self.targets[rank]).dx) if backward else (y,))

    def _collective(self, rank: int) -> None:
        with self._on("collective", rank):
            self.collectives.call(rank, self.order.uniform(*TRANSFER_US))

    def _filler(self) -> None:
        with self._on("filler"):
            torch.mm(self.factors[0], self.factors[1], out=self.product)

    def _close_gate(self) -> None:
        """What is launched from now on begins at once, some time later."""
        torch.cuda._sleep(4_000_000)
        opened = torch.cuda.current_stream().record_event()
        for stream in self.streams.values():
            stream.wait_event(opened)

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def make_streams(ranks: Ranks) -> dict[tuple, torch.cuda.Stream]:
    """Streams by kind and rank, all different; Mega MoE keeps the one that memory was put aside for."""
    streams, taken = {}, set()
    virtual = isinstance(ranks.group, VirtualGroup)
    for rank in ranks.here:
        streams["moe", rank] = ranks.group.stream(rank) if virtual else torch.cuda.Stream()
        taken.add(streams["moe", rank].cuda_stream)
    for name in [*(("collective", rank) for rank in ranks.here), ("filler",)]:
        stream = torch.cuda.Stream()
        while stream.cuda_stream in taken:  # torch hands out those of a pool in turn
            stream = torch.cuda.Stream()
        streams[name] = stream
        taken.add(stream.cuda_stream)
    return streams
