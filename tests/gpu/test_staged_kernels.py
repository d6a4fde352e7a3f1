"""The kernels around the GEMMs of the staged backend, each against plain torch, then whole calls on virtual ranks.

Properties: the routing is a stable sort and the plan aligned; dispatch puts every row where the plan says; the activation and its
gradient match FP32 torch; push and combine sum in slot order, to the bit; column sums are right and repeatable; the barrier counts, also in
CUDA graphs, and ends when a peer is late; a bad id is reported and gives NaN; whole calls match the oracle and repeat to the bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from staged_case import WEIGHTS, Case, compare, joined, like_ones

from deep_gemm import reference
from deep_gemm.activation import SwiGLU, resolve_activation
from deep_gemm.errors import PeerTimeoutError
from deep_gemm.mega.backend import Problem, WeightGrads
from deep_gemm.mega.buffer import MegaMoeBuffer
from deep_gemm.mega.staged.call import Call
from deep_gemm.testing import VirtualGroup, assert_bitwise_equal, assert_close

pytestmark = pytest.mark.gpu
BF16, F32 = torch.bfloat16, torch.float32
DEVICE = torch.device("cuda", 0)


class OnDevice:
    """A case on the GPU: buffers, problems and backends of its ranks."""

    def __init__(self, case: Case, *, capacity_factor: float = 1.1, save: str = "recompute"):
        self.case = case.to(DEVICE)
        self.group = VirtualGroup(case.num_ranks, DEVICE) if case.num_ranks > 1 else None
        settings = {**case.shape, "precision": "bf16", "capacity_factor": capacity_factor}
        ranks = range(case.num_ranks)
        self.buffers = [MegaMoeBuffer(self.group and self.group.rank(r), device=DEVICE, backend="cuda", **settings) for r in ranks]
        self.backends = [buffer.backend("cuda") for buffer in self.buffers]
        self.problems = [
            Problem(activation=case.activation, precision="bf16", save=save, buffer=self.buffers[r], **self.case.inputs(r)) for r in ranks
        ]
        self.poison()

    def poison(self) -> None:
        for backend in self.backends:
            backend.poison()

    def run(self, fn, ranks=None):
        if self.group is not None:
            return self.group.run(fn, ranks)
        return [fn(0)]

    def call(self, rank: int = 0) -> Call:
        """On the current stream."""
        return Call(self.backends[rank]._resources, self.problems[rank])

    def regions(self, rank: int = 0):
        return self.backends[rank]._resources.regions

    def solve(self, *, needs=None, grads=None):
        """[(y, Gradients)] of all ranks, all memory NaN before each direction."""
        needs = frozenset(self.case.needs if needs is None else needs)
        grads = grads or [WeightGrads() for _ in self.problems]

        def forward(r):
            a, z = self.backends[r].gemm1(self.problems[r])
            return self.backends[r].gemm2(self.problems[r], a), z

        self.poison()
        made = self.run(forward)
        self.poison()
        gradients = self.run(lambda r: self.backends[r].backward(self.problems[r], self.case.dy[r], made[r][1], needs, grads[r]))
        torch.cuda.synchronize()
        for backend in self.backends:
            backend.check()
        return [(y, g) for (y, _), g in zip(made, gradients, strict=True)]


def meta_of(device: OnDevice, rank: int = 0):
    """(source, entry, expert, weight) of the rows of the window, padding left out, and where they are in the pool."""
    layout, regions = device.backends[rank]._resources.layout, device.regions(rank)
    meta = regions._view("row_meta", torch.int32, layout.capacity_rows, 4)
    rows = torch.arange(min(int(regions.group_ends[-1]), layout.capacity_rows), device=DEVICE)
    rows = rows[meta[: len(rows), 0] >= 0]
    source, entry, expert, weight = (column.contiguous() for column in meta[rows].unbind(1))
    return source, entry.long(), expert.long(), weight.view(F32), rows


def symm_of(device: OnDevice, name: str, dtype, *shape, rank: int = 0):
    offset, _ = device.backends[rank]._resources.layout.symm[name]
    count = torch.Size(shape).numel() * dtype.itemsize
    return device.buffers[rank].symm.tensor[offset : offset + count].view(dtype).view(shape)


# ---- routing, plan, dispatch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [1, 8, 128, 1024, 1500])
@pytest.mark.parametrize("tokens, topk", [(0, 4), (1, 1), (257, 4), (4099, 8), (3000, 16)])
def test_routing_is_a_stable_sort_and_segments_are_aligned(tokens, topk, experts):
    if topk > experts:
        topk = 1
    device = OnDevice(Case(1, experts, tokens=(tokens,), topk=topk, idx=torch.int32 if tokens % 2 else torch.int64))
    device.call().publish("forward_publish")
    ids = device.case.idx[0].flatten().long()
    order = torch.cat([(ids == e).nonzero().flatten() for e in range(experts)])
    counts = torch.stack([(ids == e).sum() for e in range(experts)])
    offsets = symm_of(device, "expert_offsets", torch.int32, experts + 1)
    assert offsets.tolist() == [0, *counts.cumsum(0).tolist()]
    assert torch.equal(symm_of(device, "src_list", torch.int32, len(order)).long(), order)
    assert torch.equal(symm_of(device, "weights", F32, len(ids)), device.case.p[0].flatten())
    begin, ends = 0, []
    for count in counts.tolist():
        ends.append(begin + count)
        begin += -(-count // 128) * 128
    assert device.regions().group_ends.tolist() == ends


@pytest.mark.parametrize("hidden", [128, 768, 7168])
@pytest.mark.parametrize("ranks", [1, 4])
def test_dispatch_pulls_every_row_of_the_plan(ranks, hidden):
    device = OnDevice(Case(ranks, 16, tokens=(301, 0, 77, 512)[:ranks], hidden=hidden))

    def step(r):
        call = device.call(r)
        call.publish("backward_publish", dy=device.case.dy[r])
        call.dispatch(0, x=True, dy=True)

    device.run(step)
    each = 16 // ranks
    for rank in range(ranks):
        source, entry, expert, weight, rows = meta_of(device, rank)
        expected = [(s, e, x - rank * each) for x in range(rank * each, (rank + 1) * each) for s in range(ranks)
                    for e in (device.case.idx[s].flatten() == x).nonzero().flatten().tolist()]  # fmt: skip
        assert list(zip(source.tolist(), entry.tolist(), expert.tolist(), strict=True)) == expected
        for s in range(ranks):
            mine = source == s
            pool = device.regions(rank).rows[:, rows[mine]]
            assert torch.equal(weight[mine], device.case.p[s].flatten()[entry[mine]])
            assert torch.equal(pool[0], device.case.x[s][entry[mine] // 4])
            assert torch.equal(pool[1], device.case.dy[s][entry[mine] // 4])


def test_windows_show_the_same_rows_one_after_another():
    whole, cut = (OnDevice(Case(2, 4, tokens=(400, 380), skew=True), capacity_factor=factor) for factor in (4.0, 0.3))
    for device in (whole, cut):
        device.run(lambda r, device=device: device.call(r).publish("forward_publish"))
    whole.run(lambda r: whole.call(r).dispatch(0, x=True))
    seen = []
    layout = cut.backends[0]._resources.layout
    assert layout.rounds >= 3
    ends = cut.regions().group_ends.clone()
    for index in range(layout.rounds):
        cut.run(lambda r, index=index: cut.call(r).dispatch(index, x=True))
        begin = index * layout.capacity_rows
        rows = torch.arange(begin, max(begin, min(begin + layout.capacity_rows, int(ends[-1]))), device=DEVICE)
        meta = cut.regions()._view("row_meta", torch.int32, layout.capacity_rows, 4)[: len(rows)]
        seen.append(torch.cat([rows[:, None].int(), meta], dim=1)[meta[:, 0] >= 0])
    source, entry, expert, weight, rows = meta_of(whole)
    expected = torch.stack([rows.int(), source, entry.int(), expert.int(), weight.view(torch.int32)], dim=1)
    assert torch.equal(torch.cat(seen), expected)


# ---- activation --------------------------------------------------------------------------------------------------------------------


def prepared(case: Case) -> tuple[OnDevice, Call]:
    device = OnDevice(case)
    call = device.call()
    call.publish("backward_publish", dy=device.case.dy[0])
    call.dispatch(0, x=True, dy=True)
    return device, call


def gate_up_of(device: OnDevice, z, expert, rows):
    gate, up = z[rows].float().chunk(2, dim=1)
    if device.case.b13 is None:
        return gate, up
    gate_bias, up_bias = device.case.b13.float()[expert].chunk(2, dim=1)
    return gate + gate_bias, up + up_bias


@pytest.mark.parametrize("width", [128, 768, 2048])
@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize(
    "activation", [SwiGLU(), SwiGLU(clamp=0.7), resolve_activation("swiglu_oai", clamp=1.0)], ids=["plain", "clamp", "oai"]
)
def test_activation_and_its_gradient_match_torch(activation, pair, width):
    device, call = prepared(Case(1, 8, tokens=(150,), width=width, activation=activation, biases=activation.alpha != 1, pair=pair))
    regions, (_, _, expert, weight, rows) = device.regions(), meta_of(device)
    z = torch.randn_like(regions.z, dtype=F32).mul_(2).to(BF16)
    gate, up = gate_up_of(device, z, expert, rows)
    a = torch.full_like(regions.act, torch.nan)
    call.swiglu(0, z, a)
    truth = reference.swiglu(gate, up, activation)
    assert_close(a[rows].float(), truth, max_row_rel=4e-3, name="a")
    call.swiglu(0, z, a, weighted=True)
    assert_close(a[rows].float(), truth * weight[:, None], max_row_rel=4e-3, name="p * a")
    padding = torch.ones(len(a), dtype=torch.bool, device=DEVICE)
    padding[rows] = False
    assert a[padding].isnan().all()

    da = torch.randn_like(regions.act, dtype=F32).to(BF16)
    regions.act.copy_(da)
    call.dswiglu(0, z)
    da = da[rows].float()
    dgate, dup = reference.dswiglu(gate, up, da * weight[:, None], activation)
    dp = (da * truth).sum(1)
    if device.case.b2 is not None:
        dp += (regions.rows[1][rows].float() * device.case.b2.float()[expert]).sum(1)
    assert_close(regions.z[rows].float(), torch.cat([dgate, dup], dim=1), max_row_rel=4e-3, name="dZ")
    assert_close(regions.act[rows].float(), truth * weight[:, None], max_row_rel=4e-3, name="A'")
    measured = regions._view("row_dp", F32, len(a))[rows]
    assert_close(measured, dp, rel_frobenius=1e-5, name="dp")


def test_gradient_may_overwrite_its_pre_activations():
    device, call = prepared(Case(1, 8, tokens=(150,), width=768))
    regions, (*_, rows) = device.regions(), meta_of(device)
    z, da = torch.randn_like(regions.z), torch.randn_like(regions.act)
    regions.act.copy_(da)
    call.dswiglu(0, z)
    apart = regions.z[rows].clone()
    regions.act.copy_(da)
    regions.z.copy_(z)
    call.dswiglu(0, regions.z)
    assert_bitwise_equal(regions.z[rows], apart)


@pytest.mark.parametrize("out_dtype", [BF16, F32])
@pytest.mark.parametrize("accumulate", [False, True])
def test_bias_gradient_sums_the_columns_of_each_expert(out_dtype, accumulate):
    device, call = prepared(Case(1, 8, tokens=(900,), hidden=384, biases=True))
    regions, (_, _, expert, weight, rows) = device.regions(), meta_of(device)
    out = torch.ones(8, 384, dtype=out_dtype, device=DEVICE)
    call.bias_grad(0, regions.rows[1], regions.bias_sums2, out, weighted=True, accumulate=accumulate)
    truth = torch.zeros(8, 384, dtype=torch.float64, device=DEVICE)
    truth.index_add_(0, expert, regions.rows[1][rows].double() * weight.double()[:, None])
    assert_close(out.double(), truth + int(accumulate), rel_frobenius=1e-5 if out_dtype == F32 else 4e-3, name="db2")


# ---- push, combine -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 4, 7, 16])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_push_and_combine_sum_in_slot_order_to_the_bit(dtype, topk):
    device = OnDevice(Case(2, 32, tokens=(130, 45), hidden=640, topk=topk))
    dp_out = [torch.full((t, topk), torch.nan, device=DEVICE) for t in (130, 45)]
    out = [torch.full((t, 640), torch.nan, dtype=BF16, device=DEVICE) for t in (130, 45)]
    plain = [torch.full_like(o, torch.nan) for o in out]
    sent = [
        (torch.randn(len(device.regions(r).act), 640, device=DEVICE).to(dtype), torch.randn(len(device.regions(r).act), device=DEVICE))
        for r in (0, 1)
    ]

    def step(r):
        call, regions = device.call(r), device.regions(r)
        call.publish("forward_publish")
        call.dispatch(0, x=False)
        regions._view("row_dp", F32, len(sent[r][1])).copy_(sent[r][1])
        call.push(0, sent[r][0], dp=True)
        call.barrier("forward_push", pending_after=False)
        call.combine(out[r], weighted=True, dp_out=dp_out[r])
        call.combine(plain[r], weighted=False)

    device.run(step)
    slots = [torch.zeros(t, topk, 640, device=DEVICE) for t in (130, 45)]
    dps = [torch.zeros(t * topk, device=DEVICE) for t in (130, 45)]
    for rank in (0, 1):
        source, entry, _, _, rows = meta_of(device, rank)
        for owner in (0, 1):
            mine = source == owner
            slots[owner].view(-1, 640)[entry[mine]] = sent[rank][0][rows[mine]].to(BF16).float()
            dps[owner][entry[mine]] = sent[rank][1][rows[mine]]
    for r in (0, 1):
        total = torch.zeros(len(out[r]), 640, dtype=torch.float64, device=DEVICE)
        unweighted = torch.zeros(len(out[r]), 640, device=DEVICE)
        for k in range(topk):  # one FMA a slot: exact product, one rounding
            total = (total + device.case.p[r][:, k, None].double() * slots[r][:, k].double()).float().double()
            unweighted += slots[r][:, k]
        assert_bitwise_equal(out[r], total.to(BF16), name=f"weighted sum of rank {r}")
        assert_bitwise_equal(plain[r], unweighted.to(BF16), name=f"sum of rank {r}")
        assert torch.equal(dp_out[r].flatten(), dps[r])


def test_push_adds_the_bias_of_the_row_s_expert():
    device, call = prepared(Case(1, 8, tokens=(60,), biases=True))
    rows_in = torch.randn(len(device.regions().act), 128, device=DEVICE).to(BF16)
    call.push(0, rows_in, bias=device.case.b2)
    _, entry, expert, _, rows = meta_of(device)
    slots = symm_of(device, "combine", BF16, 60 * 4, 128)
    assert_bitwise_equal(slots[entry], (rows_in[rows].float() + device.case.b2.float()[expert]).to(BF16))


# ---- barrier and faults ------------------------------------------------------------------------------------------------------------


def epoch_of(device: OnDevice, rank: int) -> int:
    torch.cuda.synchronize()
    return int(device.regions(rank)._view("control", torch.int32, 4)[0])


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_barriers_of_all_ranks_count_together(ranks):
    device = OnDevice(Case(ranks, 16, tokens=(1,) * ranks))

    def step(r):
        for _ in range(100):
            device.call(r).barrier("forward_push", pending_after=False)

    device.run(step)
    assert [epoch_of(device, r) for r in range(ranks)] == [100] * ranks
    for backend in device.backends:
        backend.check()


def test_what_was_written_before_a_barrier_is_seen_after_it():
    """Each rank copies its neighbour's counter after every barrier; a missing release or acquire shows as an old value."""
    ranks, steps = 8, 200
    device = OnDevice(Case(ranks, 16, tokens=(1,) * ranks))
    slabs = [symm_of(device, "dp", F32, 4, rank=r) for r in range(ranks)]
    seen = torch.full((ranks, steps), -1.0, device=DEVICE)
    values = torch.arange(steps, dtype=F32, device=DEVICE)
    slabs[0][:1].copy_(values[:1])  # loads torch's copy kernel before anything spins
    torch.cuda.synchronize()

    def step(r):
        for i in range(steps):
            slabs[r][:1].copy_(values[i : i + 1])
            device.call(r).barrier("forward_publish", pending_after=False)
            seen[r, i : i + 1].copy_(slabs[(r + 1) % ranks][:1])
            device.call(r).barrier("forward_push", pending_after=False)

    device.run(step)
    torch.cuda.synchronize()
    assert torch.equal(seen, values.expand(ranks, steps))


def test_late_peer_is_named_within_the_bound(monkeypatch):
    monkeypatch.setenv("DG_TIMEOUT_S", "0.5")
    device = OnDevice(Case(3, 12, tokens=(5, 6, 7)))

    def forward(r):
        a, _ = device.backends[r].gemm1(device.problems[r])
        return device.backends[r].gemm2(device.problems[r], a)

    ys = device.run(forward, ranks=[0, 1])
    torch.cuda.synchronize()
    assert all(y.isnan().all() for y in ys)
    for _ in range(2):
        with pytest.raises(PeerTimeoutError, match=r"rank 0 waited 0\.5 s in phase 'forward publish' for rank 2: barrier 1"):
            device.backends[0].check()
    device.run(forward, ranks=[2])
    torch.cuda.synchronize()
    with pytest.raises(PeerTimeoutError, match="rank 2 stopped waiting in phase 'forward publish': rank 0 gave up"):
        device.backends[2].check()


@pytest.mark.parametrize("ranks", [1, 2])
def test_bad_id_is_named_on_every_rank_and_the_next_call_is_right(ranks):
    case = Case(ranks, 8, tokens=(37, 19)[:ranks])
    good = case.idx[0][5, 2].item()
    case.idx[0][5, 2] = 8
    device = OnDevice(case)

    def forward(r):
        a, _ = device.backends[r].gemm1(device.problems[r])
        return device.backends[r].gemm2(device.problems[r], a)

    ys = device.run(forward)
    torch.cuda.synchronize()
    assert ys[0].isnan().any(dim=1).nonzero().flatten().tolist() == [5]
    for r in range(ranks):
        with pytest.raises(ValueError, match=r"topk_idx\[5, 2\] = 8.*num_experts = 8 \(valid: -1 or 0\.\.7\)"):
            device.backends[r].check()
        assert r == 0 or not ys[r].isnan().any()
    device.case.idx[0][5, 2] = case.idx[0][5, 2] = good
    compare(case, [(y.cpu(), g) for y, g in on_cpu(device.solve())], *case.oracle())


# ---- whole calls -------------------------------------------------------------------------------------------------------------------


def on_cpu(results):
    moved = []
    for y, gradients in results:
        values = {name: value for name, value in vars(gradients).items() if value is not None}
        moved.append(
            (y.cpu(), type(gradients)(**{n: tuple(t.cpu() for t in v) if isinstance(v, tuple) else v.cpu() for n, v in values.items()}))
        )
    return moved


# Clamps that few values meet: z is kept in BF16, and one that rounds across the bound gets another derivative than in FP64.
WHOLE = {
    "one_rank": Case(1, 8, tokens=(700,), hidden=512, width=384),
    "pair_biases": Case(1, 8, tokens=(333,), hidden=256, pair=True, biases=True, idx=torch.int32),
    "two_ranks_oai": Case(2, 8, tokens=(200, 37), biases=True, activation=resolve_activation("swiglu_oai", clamp=2.0)),
    "four_ranks_one_empty": Case(4, 16, tokens=(300, 0, 64, 511), hidden=384, width=256, pair=True),
    "eight_ranks_all_to_one": Case(8, 32, tokens=(64,) * 8, skew=True),
}


@pytest.mark.parametrize("save", ["recompute", "preact"])
@pytest.mark.parametrize("name", WHOLE)
def test_forward_and_gradients_match_the_oracle_and_repeat_to_the_bit(name, save):
    case = WHOLE[name]
    device = OnDevice(case, save=save)
    first, second = on_cpu(device.solve()), on_cpu(device.solve())
    compare(case, first, *case.oracle())
    for (y, g), (y2, g2) in zip(first, second, strict=True):
        assert_bitwise_equal(y, y2, name="y")
        for field, value in vars(g).items():
            if value is not None:
                assert_bitwise_equal(joined(value), joined(getattr(g2, field)), name=field)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_several_rounds_and_accumulated_gradients(dtype, pair):
    case = Case(2, 4, tokens=(700, 680), biases=True, pair=pair, skew=True)
    device = OnDevice(case, capacity_factor=0.3)
    assert device.backends[0]._resources.layout.rounds > 2
    made = on_cpu(device.solve(grads=[WeightGrads(dtype=dtype)] * 2))
    compare(case, made, *case.oracle())
    ones = [WeightGrads(*(like_ones(tuple(t.to(DEVICE) for t in v) if isinstance(v := getattr(g, n), tuple) else v.to(DEVICE)) for n in WEIGHTS), accumulate=True)
            for _, g in made]  # fmt: skip
    again = on_cpu(device.solve(grads=ones))
    for (_, first), (_, second) in zip(made, again, strict=True):
        for name in WEIGHTS:
            assert_close(joined(getattr(second, name)).double() - 1, joined(getattr(first, name)).double(), rel_frobenius=2e-2, name=name)


def test_graph_replays_like_the_eager_call():
    case = Case(1, 8, tokens=(200,), hidden=256)
    device = OnDevice(case)
    eager = device.solve()[0][0]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        a, _ = device.backends[0].gemm1(device.problems[0])
        y = device.backends[0].gemm2(device.problems[0], a)
    for _ in range(3):
        y.fill_(torch.nan)
        device.poison()
        graph.replay()
        assert_bitwise_equal(y, eager)


def test_graphs_of_two_ranks_replay_together():
    case = Case(2, 8, tokens=(200, 77))
    device = OnDevice(case)
    eager = [y for y, _ in device.solve()]
    graphs, ys = [], []
    for r in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=device.group.stream(r)):
            a, _ = device.backends[r].gemm1(device.problems[r])
            ys.append(device.backends[r].gemm2(device.problems[r], a))
        graphs.append(graph)
    for _ in range(20):
        device.run(lambda r: graphs[r].replay())
    for y, truth in zip(ys, eager, strict=True):
        assert_bitwise_equal(y, truth)


def test_first_halves_without_second_and_second_after_another_first():
    case, other = Case(2, 8, tokens=(190, 37)), Case(2, 8, tokens=(37, 190), seed=1)
    device = OnDevice(case)
    moved = other.to(DEVICE)
    theirs = [
        Problem(activation=other.activation, precision="bf16", save="recompute", buffer=device.buffers[r], **moved.inputs(r))
        for r in range(2)
    ]

    def story(r):
        backend, mine = device.backends[r], device.problems[r]
        a, _ = backend.gemm1(mine)
        backend.gemm1(theirs[r])
        b, _ = backend.gemm1(theirs[r])
        y = backend.gemm2(mine, a)
        made = backend.backward(theirs[r], moved.dy[r], b.new_empty(0), frozenset(("x",)), WeightGrads())
        return y, backend.gemm2(theirs[r], b), made.dx

    results = device.run(story)
    torch.cuda.synchronize()
    for rank, (y, z, dx) in enumerate(results):
        assert_close(y.double().cpu(), case.oracle()[0][rank], rel_frobenius=1e-2, name="y after another A")
        assert_close(z.double().cpu(), other.oracle()[0][rank], rel_frobenius=1e-2, name="y after a backward")
        assert_close(dx.double().cpu(), other.oracle()[1]["x"][rank], rel_frobenius=2e-2, name="dx")


def test_skewed_ranks_repeat_to_the_bit():
    """50 calls with ranks delayed by different times: races show as other bits."""
    case = Case(4, 16, tokens=(128, 96, 160, 7))
    device = OnDevice(case)
    expected = device.solve()
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        delays = torch.randint(0, 400_000, (4,), generator=generator).tolist()

        def forward(r, delays=delays):
            torch.cuda._sleep(delays[r])
            a, _ = device.backends[r].gemm1(device.problems[r])
            return device.backends[r].gemm2(device.problems[r], a)

        for y, (truth, _) in zip(device.run(forward), expected, strict=True):
            assert_bitwise_equal(y, truth)
