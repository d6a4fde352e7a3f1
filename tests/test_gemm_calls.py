"""The GEMM calls up to the launch, without a GPU. Properties: a call that describes the same memory is looked up and launches the same, and
any other is not; work beside the launch is done at every call; a plan runs on its device and keeps its tensors; what the arguments say
reaches the kernel's parameters; wrong arguments are named with what came and what was expected, before anything is launched."""

from __future__ import annotations

import gc
import inspect
import re
import threading
import weakref

import pytest
import torch
from gemm_machine import BF16, F32, NUM_SMS, Machine, OnGpu0, ints, strided, zeros

from deep_gemm import gemm, gemm_launch
from deep_gemm.errors import BackendUnavailable
from deep_gemm.gemm_config import GemmConfig, Tile
from deep_gemm.gemm_launch import Gate, GemmPlan, remembered


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    made = Machine()
    made.replace(monkeypatch)
    return made


@pytest.fixture
def call():
    """A remembered call of anything; `call.made` counts how often it ran. The plan's params are the number of the run."""
    config = GemmConfig("dense", "k", "k", BF16, Tile(128, 6, True))

    @remembered
    def made(*args, **kwargs) -> None:
        made.made += 1
        gemm_launch._start(config, 0, bytes([made.made]), 10, None, (*args, *kwargs.values()))

    made.made = 0
    return made


def entries(call) -> dict:
    return inspect.getclosurevars(call).nonlocals["launches"]


# ---- remembered calls --------------------------------------------------------------------------------------------------------------


class Both:
    """Arguments of a call."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs

    def of(self, call) -> None:
        call(*self.args, **self.kwargs)


BASE = torch.zeros(16, 16, dtype=BF16).as_subclass(OnGpu0)
OTHER_GPU = BASE.as_subclass(torch.Tensor).as_subclass(type(zeros(1, gpu=1)))


@pytest.mark.parametrize(
    "different",
    [
        [Both(1), Both(True), Both(1.0), Both("1"), Both(None), Both((1,)), Both()],
        [Both(0), Both(False), Both(None), Both(0.0)],
        [Both(1, 2), Both(2, 1), Both(1, x=2), Both(x=1, y=2), Both(x=2, y=1), Both(1, "x", 2)],
        [Both("x", 1), Both(x=1), Both(1, "x")],
        [Both([1, 2]), Both([2, 1]), Both([1]), Both([])],
        [Both(BASE), Both(BASE[8:]), Both(BASE[:8]), Both(BASE[:, :8]), Both(BASE.t()), Both(BASE.view(8, 32)), Both(BASE[None])],
        [Both(BASE), Both(BASE.view(torch.float16)), Both(BASE.view(torch.int16))],
        [Both(BASE), Both(OTHER_GPU)],
        [Both(BASE), Both(x=BASE), Both(y=BASE)],
        [Both(BASE[:8], BASE[8:]), Both(BASE[8:], BASE[:8])],
    ],
    ids=["types", "nothing", "places", "names", "lists", "views", "dtypes", "devices", "keywords", "order"],
)
def test_calls_that_differ_are_told_apart_and_found_again(machine, call, different):
    for both in different + different:
        both.of(call)
    assert call.made == len(different)
    once, again = machine.launches[: len(different)], machine.launches[len(different) :]
    assert once == again and len({launch.params for launch in once}) == len(different)


def test_the_same_memory_is_the_same_call_whatever_object_describes_it(machine, call):
    for tensor in (BASE, BASE[:], BASE.view_as(BASE), BASE.t().t(), BASE.view(256).view(16, 16)):
        call(tensor)
    BASE.fill_(1)
    call(BASE)
    assert call.made == 1 and len(machine.launches) == 6


def test_lists_count_by_what_they_hold_as_tuples_do(call):
    sizes = [3, 4]
    for value in (sizes, [3, 4], (3, 4)):
        call(value)
    assert call.made == 1
    sizes.append(5)
    call(sizes)
    assert call.made == 2


@pytest.mark.parametrize("unhashable", [{}, [[1]], {1}, ([],)], ids=repr)
def test_arguments_that_cannot_be_looked_up_go_to_the_call(machine, call, unhashable):
    for _ in range(2):
        call(unhashable)
    assert call.made == len(machine.launches) == 2 and not entries(call)


def test_tensors_without_memory_go_to_the_call(machine, call):
    sparse = torch.zeros(8, 8).to_sparse()
    with pytest.raises(RuntimeError):
        sparse.data_ptr()
    for _ in range(2):
        call(sparse)
        call(x=sparse)
    assert call.made == len(machine.launches) == 4 and not entries(call)


WITHOUT_MEMORY = [torch.zeros(8, 8, dtype=BF16).to_sparse(), torch.zeros(8, 8, dtype=BF16, device="meta"), [[1.0]], None]


@pytest.mark.parametrize("a", WITHOUT_MEMORY, ids=["sparse", "meta", "list", "none"])
def test_the_call_itself_says_what_is_wrong_with_such_an_argument(a):
    for _ in range(2):
        with pytest.raises(
            (TypeError, BackendUnavailable), match=r"^a(\.device = (cpu|meta): .* need CUDA| is a (list|NoneType): expected a tensor)"
        ):
            gemm.bf16_gemm_nt(a, zeros(8, 8), zeros(8, 8))


def test_a_failed_call_is_not_remembered(machine):
    a, b = zeros(64, 64), zeros(128, 64)
    for _ in range(2):
        with pytest.raises(ValueError, match="d.shape"):
            gemm.bf16_gemm_nt(a, b, zeros(64, 64))
    gemm.bf16_gemm_nt(a, b, zeros(64, 128))
    assert len(machine.launches) == 1


def test_the_second_call_makes_no_maps_and_launches_the_same_parameters(machine):
    a, b, d, ends = zeros(256, 64), zeros(2, 192, 64), zeros(256, 192), ints(128, 256)
    for name, weight in (("nt", b), ("nn", b.transpose(1, 2))):
        machine.num_maps = 0
        for _ in range(3):
            getattr(gemm, f"m_grouped_bf16_gemm_{name}_contiguous")(a, weight, d, ends, use_psum_layout=True)
        assert machine.num_maps == 3
    assert len(machine.launches) == 6 and len(set(machine.launches)) == 1


def test_a_remembered_call_keeps_no_tensor_alive(machine):
    d = zeros(64, 64)
    gone = weakref.ref(d)
    gemm.bf16_gemm_nt(zeros(64, 64), zeros(64, 64), d)
    del d
    gc.collect()
    assert gone() is None and len(machine.launches) == 1


def test_another_number_of_sms_is_another_plan_and_the_first_is_kept(machine):
    a, b, d = zeros(4096, 64), zeros(4096, 64), zeros(4096, 4096)
    for num_sms in (0, 8, 33, 1, 1000, 0, 8):
        gemm.set_num_sms(num_sms)
        gemm.bf16_gemm_nt(a, b, d)
    ctas = [launch.num_ctas for launch in machine.launches]
    assert ctas == [132, 8, 33 // machine.launches[2].cluster * machine.launches[2].cluster, 1, 132, 132, 8]
    assert machine.num_maps == 3 * 5
    assert machine.launches[0] == machine.launches[5] and machine.launches[1] == machine.launches[6]


def test_the_number_of_remembered_calls_is_bounded(machine, call, monkeypatch):
    monkeypatch.setattr(gemm_launch, "_REMEMBERED_LAUNCHES", 3)
    for i in range(10):
        call(i)
        call(i)
        assert len(entries(call)) <= 3
    assert call.made == 10
    assert [launch.params[0] for launch in machine.launches] == [i // 2 + 1 for i in range(20)]
    call(0)
    assert call.made == 11 and machine.launches[-1].params == bytes([11])


def test_work_beside_the_launch_is_done_at_every_call(machine):
    a, b, c, d = zeros(64, 64), zeros(64, 64), zeros(64, 64), zeros(64, 64)
    for value in (1.0, 2.0):
        c.fill_(value)
        gemm.bf16_gemm_nt(a, b, d, c)
        assert (d == value).all()
    assert len(machine.launches) == 2 and all(launch["accumulate"] == 1 for launch in machine.launches)


def test_group_sizes_are_summed_up_at_every_call(machine, monkeypatch):
    a, b, d, sizes = zeros(8, 64), zeros(8, 64), zeros(2, 64, 64), ints(3, 5)
    seen = []
    monkeypatch.setattr(gemm, "launch", lambda *args, layout, **kwargs: seen.append(layout.tolist()))
    gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, None, sizes)
    sizes.copy_(ints(6, 2))
    gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, None, sizes)
    assert seen == [[3, 8], [6, 8]]


@pytest.mark.parametrize("with_c", [False, True])
def test_an_empty_sum_is_stored_at_every_call_without_a_launch(machine, with_c):
    d, c = zeros(64, 64), zeros(64, 64)
    for value in (1.0, 2.0):
        d.fill_(7.0)
        c.fill_(value)
        gemm.bf16_gemm_nt(zeros(64, 0), zeros(64, 0), d, c if with_c else None)
        assert (d == (value if with_c else 0.0)).all()
    gemm.bf16_gemm_nt(zeros(0, 64), zeros(64, 64), zeros(0, 64))
    assert not machine.launches


# ---- plans -------------------------------------------------------------------------------------------------------------------------


def dense(gpu: int = 0, m: int = 192) -> tuple[torch.Tensor, ...]:
    return zeros(m, 64, gpu=gpu), zeros(128, 64, gpu=gpu), zeros(m, 128, gpu=gpu)


def test_a_plan_runs_nothing_when_made_and_then_what_the_call_would(machine):
    tensors = dense()
    plan = gemm.plan_gemm(gemm.bf16_gemm_nt, *tensors)
    assert isinstance(plan, GemmPlan) and not machine.launches
    plan()
    plan()
    gemm.bf16_gemm_nt(*tensors)
    assert len(machine.launches) == 3 and len(set(machine.launches)) == 1


def test_a_plan_of_a_call_that_is_remembered_keeps_its_tensors(machine):
    a, b, d = dense()
    gemm.bf16_gemm_nt(a, b, d)
    plan = gemm.plan_gemm(gemm.bf16_gemm_nt, a, b, d)
    alive = [weakref.ref(t) for t in (a, b, d)]
    del a, b, d
    gc.collect()
    assert all(ref() is not None for ref in alive)
    del plan
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_a_plan_takes_the_stream_that_is_given_or_the_current_one_at_the_call(machine, monkeypatch):
    plan = gemm.plan_gemm(gemm.bf16_gemm_nt, *dense())
    monkeypatch.setattr(machine, "stream_of", lambda device: 500 + device)
    plan()
    plan(stream=77)
    plan(stream=0)
    assert [launch.stream for launch in machine.launches] == [500, 77, 0]


@pytest.mark.parametrize("how", ["call", "again", "plan", "plan with stream", "launch"])
@pytest.mark.parametrize("current, gpu", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_gemm_runs_on_the_device_of_its_tensors(machine, how, current, gpu):
    tensors = dense(gpu)
    if how == "again":
        gemm.bf16_gemm_nt(*tensors)
        machine.launches.clear()
    machine.current = current
    if how in ("call", "again"):
        gemm.bf16_gemm_nt(*tensors)
    elif how == "launch":
        gemm_launch.launch("dense", *tensors, m=192)
    else:
        gemm.plan_gemm(gemm.bf16_gemm_nt, *tensors)(*((1000 + gpu,) if "stream" in how else ()))
    launch = machine.only()
    assert (launch.device, launch.current, launch.stream) == (gpu, gpu, machine.stream_of(gpu))
    assert launch.num_ctas == NUM_SMS[gpu] // launch.cluster * launch.cluster
    assert machine.current == current


def test_the_current_device_is_as_before_when_the_launch_fails(machine, monkeypatch):
    plan = gemm.plan_gemm(gemm.bf16_gemm_nt, *dense(gpu=1))
    monkeypatch.setattr(gemm_launch, "_kernel", lambda config, device: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plan()
    assert machine.current == 0


def with_another_c():
    gemm.bf16_gemm_nt(*dense(), zeros(192, 128))


def with_sizes():
    gemm.k_grouped_bf16_gemm_tn_contiguous(zeros(8, 64), zeros(8, 64), zeros(2, 64, 64), None, ints(3, 5))


def without_rows():
    gemm.bf16_gemm_nt(*dense(m=0))


def twice():
    gemm.bf16_gemm_nt(*dense())
    gemm.bf16_gemm_nt(*dense())


@pytest.mark.parametrize(
    "call, text",
    [
        (with_another_c, "c is copied into d first; give c = d"),
        (with_sizes, "group sizes are summed up first; give ends (use_psum_layout=True)"),
        (without_rows, "makes 0 launches: expected one (an empty result needs no plan)"),
        (twice, "makes 2 launches: expected one"),
    ],
)
def test_what_no_plan_can_repeat_is_refused(machine, call, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        gemm.plan_gemm(call)
    assert not machine.launches
    gemm.bf16_gemm_nt(*dense())
    assert len(machine.launches) == 1, "the launch went to the plan that was refused"


def test_a_plan_inside_a_plan_is_refused_and_a_failed_call_leaves_nothing_behind(machine):
    with pytest.raises(RuntimeError, match="a plan is being made already"):
        gemm.plan_gemm(lambda: gemm.plan_gemm(gemm.bf16_gemm_nt, *dense()))
    with pytest.raises(ValueError, match="d.shape"):
        gemm.plan_gemm(gemm.bf16_gemm_nt, *dense()[:2], zeros(1, 1))
    gemm.bf16_gemm_nt(*dense())
    assert len(machine.launches) == 1


def test_other_threads_launch_while_a_plan_is_made(machine):
    def call() -> None:
        other = threading.Thread(target=gemm.bf16_gemm_nt, args=dense(m=64))
        other.start()
        other.join()
        gemm.bf16_gemm_nt(*dense())

    plan = gemm.plan_gemm(call)
    assert machine.only()["m"] == 64
    plan()
    assert machine.launches[1]["m"] == 192


# ---- what reaches the kernel -------------------------------------------------------------------------------------------------------


def holds(launch, **expected) -> None:
    assert {name: launch[name] for name in expected} == expected


@pytest.mark.parametrize("order", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_dense(machine, order, dtype):
    m, n, k = 192, 128, 64
    a, b = zeros(*((m, k) if order[0] == "n" else (k, m))), zeros(*((n, k) if order[1] == "t" else (k, n)))
    d = zeros(m, 256, dtype=dtype)[:, 64:192]
    for c in (None, d):
        getattr(gemm, f"bf16_gemm_{order}")(a, b, d, c)
        launch = machine.launches[-1]
        holds(launch, m=m, n=n, k=k, d=d.data_ptr(), ldd=256, accumulate=c is not None, d_has_map=1, gather_rows=0, carry_in=0, carry_out=0)
        config = launch.config
        assert (config.kind, config.a_major, config.b_major) == (
            "dense",
            "k" if order[0] == "n" else "mn",
            "k" if order[1] == "t" else "mn",
        )
        assert (config.d_dtype, launch.smem_bytes) == (dtype, config.smem_bytes)
        for name, tensor in (("a", a), ("b", b), ("d_map", d)):
            assert machine.maps[launch[name]][0] == tensor.data_ptr()
        for name, major, rows in (("a", config.a_major, 128), ("b", config.b_major, config.tile.block_n)):
            box = (64, rows // config.tile.cluster, 1) if major == "k" else (64, 64, 1)  # a tile is one box a CTA, or one per 64 columns
            assert machine.maps[launch[name]][4] == box


@pytest.mark.parametrize(
    "d", [zeros(64, 72)[:, 4:68], zeros(64, 68, dtype=F32)[:, 1:65], zeros(64, 70)[:, :64]], ids=["start", "fp32", "row"]
)
def test_a_result_that_tma_cannot_write_has_no_map(machine, d):
    gemm.bf16_gemm_nt(zeros(64, 64), zeros(64, 64), d)
    holds(machine.only(), d_has_map=0, d_map=bytes(128), d=d.data_ptr(), ldd=d.stride(0))


@pytest.mark.parametrize("order", ["nt", "nn"])
@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
def test_m_grouped(machine, order, psum, gathered):
    a, b, d = zeros(300 if gathered else 256, 64), zeros(*((2, 192, 64) if order == "nt" else (2, 64, 192))), zeros(256, 192)
    layout, rows = ints(*((100, 200) if psum else 256 * (0,))), ints(*range(256)) if gathered else None
    getattr(gemm, f"m_grouped_bf16_gemm_{order}_contiguous")(a, b, d, layout, use_psum_layout=psum, a_rows=rows)
    launch = machine.only()
    holds(launch, m=256, n=192, k=64, num_groups=2, group_layout=layout.data_ptr(), window_begin=0, window_end=256, alignment=128)
    config = launch.config
    assert (config.kind, config.b_major, config.gather) == (
        "m_ends" if psum else "m_index",
        "k" if order == "nt" else "mn",
        "a" if gathered else "none",
    )
    if gathered:
        holds(launch, a=bytes(128), gather_rows=rows.data_ptr(), gather_source=a.data_ptr(), gather_stride=64)
    else:
        holds(launch, gather_rows=0, gather_source=0)
        assert machine.maps[launch["a"]][0] == a.data_ptr()


def test_m_grouped_masked(machine):
    a, b, d, counts = zeros(3, 128, 64), zeros(3, 192, 64), zeros(3, 128, 192), ints(1, 2, 3)
    gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, counts, 2)
    assert machine.only().config.kind == "m_masked"
    holds(machine.only(), m=128, n=192, k=64, num_groups=3, group_layout=counts.data_ptr(), window_end=128, d_group_stride=128 * 192)


@pytest.mark.parametrize("psum", [False, True])
@pytest.mark.parametrize("gathered", ["none", "a", "b"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_k_grouped(machine, psum, gathered, dtype):
    rows, lists = 256, {"none": {}, "a": {"a_rows": ints(*range(256))}, "b": {"b_rows": ints(*range(256))}}[gathered]
    a, b = (zeros(300 if gathered == name else rows, width) for name, width in (("a", 128), ("b", 192)))
    d, layout = zeros(2, 128, 192, dtype=dtype), ints(100, 200)
    gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, None, layout, d, use_psum_layout=psum, **lists)
    launch = machine.only()
    holds(
        launch,
        m=128,
        n=192,
        num_groups=2,
        window_begin=0,
        window_end=rows,
        alignment=128 if psum else 1,
        accumulate=1,
        d_group_stride=128 * 192,
    )
    assert (launch.config.kind, launch.config.gather, launch.config.d_dtype) == ("k_ends", gathered, dtype)
    if psum:
        holds(launch, group_layout=layout.data_ptr())
    for name, tensor in (("a", a), ("b", b)):
        if gathered == name:
            holds(launch, gather_source=tensor.data_ptr(), gather_rows=lists[f"{name}_rows"].data_ptr(), **{name: bytes(128)})
        else:
            assert machine.maps[launch[name]][0] == tensor.data_ptr()


def test_windows_take_the_halves_of_the_carry_in_turn(machine):
    carry = zeros(2, 128, 64, dtype=F32)
    for begin in (0, 256, 512):
        gemm.launch_k_grouped(zeros(256, 128), zeros(256, 64), zeros(2, 128, 64), ints(100, 600), window=(begin, begin + 256), carry=carry)
    halves = [half.data_ptr() for half in carry]
    assert [launch["carry_out"] for launch in machine.launches] == [halves[0], halves[1], halves[0]]
    assert [launch["carry_in"] for launch in machine.launches] == [halves[1], halves[0], halves[1]]
    assert [(launch["window_begin"], launch["window_end"]) for launch in machine.launches] == [(0, 256), (256, 512), (512, 768)]


GATE = Gate(1.702, 1.0, 7.0, gate_bias=64, up_bias=128, bias_stride=512, row_weight=256, row_weight_stride=16)
GATE_FIELDS = {
    "up_offset": 1.0,
    "clamp": 7.0,
    "gate_bias": 64,
    "up_bias": 128,
    "bias_stride": 512,
    "row_weight": 256,
    "row_weight_stride": 16,
}


@pytest.mark.parametrize("save_z", [False, True])
def test_swiglu(machine, save_z):
    x, w13, a, z = zeros(256, 64), zeros(2, 256, 64), zeros(256, 128), zeros(256, 256)
    ends = ints(1, 200)
    gemm_launch.launch_swiglu(x, w13[:, :128], w13[:, 128:], a, ends, GATE, z=z if save_z else None, window=(128, 384))
    launch = machine.only()
    holds(
        launch,
        m=256,
        n=128,
        k=64,
        num_groups=2,
        group_layout=ends.data_ptr(),
        save_z=save_z,
        window_begin=128,
        window_end=384,
        **GATE_FIELDS,
    )
    for name, tensor in {"a": x, "b": w13, "b_up": w13[:, 128:]}.items():
        assert machine.maps[launch[name]][0] == tensor.data_ptr(), name
    holds(launch, d=a.data_ptr(), ldd=128, gate_out=z.data_ptr() if save_z else 0, up_out=z[:, 128:].data_ptr() if save_z else 0)
    assert launch["gate_up_ld"] == (256 if save_z else 0) and launch["z_gate_map"] == launch["z_up_map"] == bytes(128)
    assert launch.config.epilogue == "swiglu" and machine.maps[launch["b"]][4][1] == launch.config.tile.block_n // 2


def test_dswiglu(machine):
    width = 256
    dy, w2, z, dz, act = zeros(256, 64), zeros(2, 64, width), zeros(256, 2 * width), zeros(256, 2 * width), zeros(256, width)
    row_dp = zeros(gemm_launch.dp_parts(width), 300, dtype=F32)
    assert row_dp.shape[0] == 2
    gemm_launch.launch_dswiglu(dy, w2, z, dz, act, row_dp, ints(1, 200), GATE)
    launch = machine.only()
    holds(launch, m=256, n=width, k=64, num_groups=2, row_dp=row_dp.data_ptr(), row_dp_stride=300, **GATE_FIELDS)
    for name, tensor in {"z_gate_map": z, "z_up_map": z[:, width:], "a": dy, "b": w2}.items():
        assert machine.maps[launch[name]][0] == tensor.data_ptr(), name
    holds(launch, gate_out=dz.data_ptr(), up_out=dz[:, width:].data_ptr(), gate_up_ld=2 * width, d=act.data_ptr(), ldd=width)
    assert launch.config.tile.block_n == gemm_launch.DP_COLUMNS, "a partial sum of dp per tile"


# ---- errors ------------------------------------------------------------------------------------------------------------------------

NT, GROUPED, MASKED, K_GROUPED = (
    "bf16_gemm_nt",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "k_grouped_bf16_gemm_tn_contiguous",
)


def good(name: str) -> dict[str, object]:
    """Arguments of a call that launches."""
    if name == NT:
        return {"a": zeros(64, 64), "b": zeros(128, 64), "d": zeros(64, 128)}
    if name == GROUPED:
        return {"a": zeros(128, 64), "b": zeros(2, 128, 64), "d": zeros(128, 128), "grouped_layout": ints(3, 128), "use_psum_layout": True}
    if name == MASKED:
        return {"a": zeros(2, 64, 64), "b": zeros(2, 128, 64), "d": zeros(2, 64, 128), "masked_m": ints(3, 64), "expected_m": 7}
    return {"a": zeros(40, 64), "b": zeros(40, 128), "d": zeros(2, 64, 128), "ks_cpu": None, "grouped_layout": ints(30, 10)}


LIST_128, LIST_40 = ints(*range(128)), ints(*range(40))
FAR = 2**33  # elements: the fifth row begins at 64 GiB
ELSEWHERE = ["cuda:1", "cuda:0"]
FIRST_AND_LAST = "expected unit stride in the last dimension, and a multiple of 8 in the first"
WITHIN = "expected the last row to begin within 64 GiB, as rows are gathered"
ROWS = "expected rows of unit stride and a multiple of 8 elements, as they are gathered"

ALL = (NT, GROUPED, MASKED, K_GROUPED)


def elsewhere(name: str, argument: str) -> dict[str, torch.Tensor]:
    like = good(name)[argument]
    return {argument: zeros(*like.shape, dtype=like.dtype, gpu=1)}


BAD = [
    *((name, elsewhere(name, "b"), ValueError, ["b.device = cuda:1", "a's device = cuda:0"]) for name in ALL),
    *((name, elsewhere(name, "d"), ValueError, ["d.device = cuda:1", "expected cuda:0"]) for name in ALL),
    (GROUPED, {"grouped_layout": ints(3, 5, gpu=1)}, ValueError, ["grouped_layout.device = cuda:1", "expected cuda:0"]),
    (K_GROUPED, {"grouped_layout": ints(3, 5, gpu=1)}, ValueError, ["grouped_layout.device = cuda:1", "expected cuda:0"]),
    (MASKED, {"masked_m": ints(3, 5, gpu=1)}, ValueError, ["masked_m.device = cuda:1", "expected cuda:0"]),
    (NT, {"c": zeros(64, 128, gpu=1)}, ValueError, ["c is torch.bfloat16 on cuda:1", "expected torch.bfloat16 on cuda:0, as d"]),
    (NT, {"c": zeros(64, 64)}, ValueError, ["c.shape = (64, 64)", "d.shape = (64, 128)"]),
    (NT, {"a": torch.zeros(64, 64, dtype=BF16)}, BackendUnavailable, ["a.device = cpu", "need CUDA tensors on a Hopper GPU"]),
    (NT, {"a": zeros(64, 64, dtype=F32)}, TypeError, ["a.dtype = torch.float32", "expected torch.bfloat16"]),
    (NT, {"b": zeros(128, 72)}, ValueError, ["b.shape[k] = 72", "a's k = 64"]),
    (NT, {"a": zeros(64, 68)[:, :64]}, ValueError, ["a: shape (64, 64), strides (68, 1)", "multiples of 8 elements"]),
    (NT, {"a": zeros(1)}, ValueError, ["a.shape = (1,)", "expected 2 dimensions"]),
    (NT, {"d": zeros(128, 64).t()}, ValueError, ["d.stride() = (1, 64)", "expected unit stride in the last dimension"]),
    (NT, {"d": zeros(64, 128, dtype=torch.float16)}, TypeError, ["d.dtype = torch.float16", "expected torch.bfloat16 or torch.float32"]),
    (MASKED, {"b": zeros(3, 128, 64)}, ValueError, ["b.shape[0] = 3", "a's number of groups = 2"]),
    (MASKED, {"expected_m": 0}, ValueError, ["expected_m = 0", "expected a positive int"]),
    (GROUPED, {"grouped_layout": ints(3, 5, 6)}, ValueError, ["grouped_layout: shape (3,)", "expected contiguous (2,)"]),
    (GROUPED, {"grouped_layout": ints(3, 128).long()}, TypeError, ["grouped_layout.dtype = torch.int64", "expected torch.int32"]),
    # k-grouped operands
    (K_GROUPED, {"a": zeros(64, 40).t()}, ValueError, ["a.stride() = (1, 40)", FIRST_AND_LAST]),
    (K_GROUPED, {"b": zeros(128, 40).t()}, ValueError, ["b.stride() = (1, 40)", FIRST_AND_LAST]),
    (K_GROUPED, {"a": zeros(40, 1), "d": zeros(2, 1, 128)}, ValueError, ["a.stride() = (1, 1)", FIRST_AND_LAST]),
    (K_GROUPED, {"b": zeros(40, 1), "d": zeros(2, 64, 1)}, ValueError, ["b.stride() = (1, 1)", FIRST_AND_LAST]),
    (K_GROUPED, {"a": strided((1, 64), (8, 40)), "b": zeros(1, 128)}, ValueError, ["a.stride() = (8, 40)", "expected unit stride in"]),
    (K_GROUPED, {"b": zeros(48, 128)}, ValueError, ["b.shape[0] = 48", "the other operand's rows = 40"]),
    (K_GROUPED, {"ks_cpu": [40]}, ValueError, ["ks_cpu has 1 entries", "d has 2 groups"]),
    (K_GROUPED, {"a_rows": LIST_40, "b_rows": LIST_40}, ValueError, ["a_rows and b_rows are both given", "expected one of them at most"]),
    # gathered operands
    (GROUPED, {"a": strided((5, 64), (FAR, 1)), "a_rows": LIST_128}, ValueError, [f"a: shape (5, 64), strides ({FAR}, 1)", WITHIN]),
    (K_GROUPED, {"a": strided((5, 64), (FAR, 1)), "a_rows": LIST_40}, ValueError, [f"a: shape (5, 64), strides ({FAR}, 1)", WITHIN]),
    (K_GROUPED, {"b": strided((5, 128), (FAR, 1)), "b_rows": LIST_40}, ValueError, [f"b: shape (5, 128), strides ({FAR}, 1)", WITHIN]),
    (GROUPED, {"a": zeros(64, 128).t(), "a_rows": LIST_128, "b": zeros(2, 128, 64)}, ValueError, ["a: shape (128, 64), strides (1, 128)", ROWS]),
    (GROUPED, {"a": zeros(9, 64)[:, :60], "a_rows": LIST_128, "b": zeros(2, 128, 64)[..., :60]}, ValueError, ["a: shape (9, 60), strides (64, 1)", ROWS]),
    (K_GROUPED, {"b": zeros(9, 128)[:, :60], "b_rows": LIST_40, "d": zeros(2, 64, 60)}, ValueError, ["b: shape (9, 60), strides (128, 1)", ROWS]),
    (GROUPED, {"a_rows": LIST_40}, ValueError, ["a_rows: shape (40,)", "expected contiguous (128,)"]),
    (GROUPED, {"a_rows": ints(*range(256))[::2]}, ValueError, ["a_rows: shape (128,), strides (2,)", "expected contiguous (128,)"]),
    (GROUPED, {"a_rows": LIST_128.long()}, TypeError, ["a_rows.dtype = torch.int64", "expected torch.int32"]),
    (GROUPED, {"a_rows": ints(*range(128), gpu=1)}, ValueError, ["a_rows.device = cuda:1", "expected cuda:0"]),
    (K_GROUPED, {"a_rows": LIST_128}, ValueError, ["a_rows: shape (128,)", "expected contiguous (40,)"]),
    (K_GROUPED, {"b_rows": LIST_40.float()}, TypeError, ["b_rows.dtype = torch.float32", "expected torch.int32"]),
]  # fmt: skip


@pytest.mark.parametrize("name, changes, error, pieces", BAD)
def test_wrong_arguments_are_named(machine, name, changes, error, pieces):
    with pytest.raises(error) as caught:
        getattr(gemm, name)(**good(name) | changes)
    assert all(piece in str(caught.value) for piece in pieces), caught.value
    assert not machine.launches and not machine.num_maps
    getattr(gemm, name)(**good(name))
    assert len(machine.launches) == 1


@pytest.mark.parametrize("rows, stride", [(5, FAR - 8), (4, FAR), (1, 2**40)])
def test_a_gathered_operand_may_reach_as_far_as_64_gib(machine, rows, stride):
    gemm.m_grouped_bf16_gemm_nt_contiguous(**good(GROUPED) | {"a": strided((rows, 64), (stride, 1)), "a_rows": LIST_128})
    holds(machine.only(), gather_stride=stride)


@pytest.mark.parametrize("shape, stride", [((40, 64), (128, 1)), ((40, 1), (8, 1)), ((40, 1), (8, 8))])
def test_k_grouped_operands_that_tma_can_read(machine, shape, stride):
    a = strided(shape, stride)
    gemm.k_grouped_bf16_gemm_tn_contiguous(**good(K_GROUPED) | {"a": a, "d": zeros(2, shape[1], 128)})
    assert machine.maps[machine.only()["a"]][3][0] == 2 * stride[0]
