"""Bad input: every fault names the argument, what came and what was expected, before the backend runs; the next good call works."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from api_inputs import E, H, I, K, T, count_calls, make_buffer, make_inputs

import deep_gemm
from deep_gemm.jit import driver
from deep_gemm.mega import checks
from deep_gemm.mega.backend import cuda_missing, on_device
from deep_gemm.mega.groups import SingleGroup, resolve_group

w13_shape = (E, 2 * I, H)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def with_id(expert: int):
    def change(topk_idx: torch.Tensor) -> torch.Tensor:
        topk_idx[17, 2] = expert
        return topk_idx

    return change


# (argument, how it is spoilt, exception, pieces of the text)
BAD_TENSORS = [
    ("x", lambda x: x.half(), TypeError, ["x.dtype = torch.float16", "expected torch.bfloat16 or torch.float32 or torch.float64"]),
    ("x", lambda x: x[:, :-1], ValueError, ["x.shape = (23, 9)", "expected (T, 10) = [T, hidden]"]),
    ("x", lambda x: x[0], ValueError, ["x.shape = (10,)", "expected (T, 10)"]),
    ("x", lambda x: torch.cat((x, x)), ValueError, ["x.shape = (46, 10): T = 46 tokens", "at most num_max_tokens_per_rank = 23"]),
    ("x", lambda x: x.to("meta"), ValueError, ["x.device = meta", "expected cpu, the device of the buffer"]),
    ("x", strided, ValueError, ["x is not contiguous: strides (20, 2)", "pass x.contiguous()"]),
    ("x", lambda x: x.tolist(), TypeError, ["x = list", "expected a torch.Tensor"]),
    ("topk_idx", lambda i: i.short(), TypeError, ["topk_idx.dtype = torch.int16", "expected torch.int64 or torch.int32"]),
    ("topk_idx", lambda i: i[:, :2].contiguous(), ValueError, ["topk_idx.shape = (23, 2)", "expected (23, 3) = [T, num_topk]"]),
    ("topk_idx", lambda i: i[:-1], ValueError, ["topk_idx.shape = (22, 3)", "expected (23, 3)"]),
    ("topk_idx", with_id(E), ValueError, ["topk_idx[17, 2] = 6, but num_experts = 6 (valid: -1 or 0..5)"]),
    ("topk_idx", with_id(-2), ValueError, ["topk_idx[17, 2] = -2, but num_experts = 6 (valid: -1 or 0..5)"]),
    ("topk_idx", lambda i: with_id(131)(i.int()), ValueError, ["topk_idx[17, 2] = 131"]),
    ("topk_idx", strided, ValueError, ["topk_idx is not contiguous"]),
    ("topk_weights", lambda p: p.half(), TypeError, ["topk_weights.dtype = torch.float16", "expected torch.float32 or torch.bfloat16"]),
    ("topk_weights", lambda p: p.double(), TypeError, ["topk_weights.dtype = torch.float64"]),
    ("topk_weights", lambda p: p[..., None], ValueError, ["topk_weights.shape = (23, 3, 1)", "expected (23, 3)"]),
    ("topk_weights", lambda p: None, TypeError, ["topk_weights = NoneType"]),
    ("w13", lambda w: w.bfloat16(), TypeError, ["w13.dtype = torch.bfloat16", "expected torch.float32"]),
    ("w13", lambda w: w[:-1], ValueError, ["w13.shape = (5, 14, 10)", "expected (6, 14, 10) = [num_local_experts, 2 * intermediate_hidden, hidden]"]),
    ("w13", lambda w: w.transpose(1, 2), ValueError, ["w13.shape = (6, 10, 14)", "expected (6, 14, 10)"]),
    ("w13", lambda w: (w, w), ValueError, ["w13[0].shape = (6, 14, 10)", "expected (6, 7, 10) = [num_local_experts, intermediate_hidden, hidden]"]),
    ("w13", lambda w: w.chunk(2, 1), ValueError, ["w13[0] is not contiguous"]),
    ("w13", lambda w: (w, w, w), TypeError, ["w13 = tuple", "or a pair (gate, up) of tensors"]),
    ("w13", lambda w: (w[:, :I].contiguous(), None), TypeError, ["w13 = tuple", "or a pair (gate, up) of tensors"]),
    ("w2", lambda w: w.transpose(1, 2).contiguous(), ValueError, ["w2.shape = (6, 7, 10)", "expected (6, 10, 7) = [num_local_experts, hidden, intermediate"]),
    ("w2", lambda w: w.transpose(1, 2).contiguous().transpose(1, 2), ValueError, ["w2 is not contiguous"]),
    ("b13", lambda b: None, ValueError, ["b2 was given without b13"]),
    ("b2", lambda b: None, ValueError, ["b13 was given without b2"]),
    ("b2", lambda b: b[:, 1:].contiguous(), ValueError, ["b2.shape = (6, 9)", "expected (6, 10) = [num_local_experts, hidden]"]),
    ("b13", lambda b: (b[:, :I].contiguous(), b[:, I:].contiguous()), ValueError, ["b13 has 2 part(s), w13 has 1", "the same split"]),
    ("b13", lambda b: b.bfloat16(), TypeError, ["b13.dtype = torch.bfloat16", "expected torch.float32"]),
]

BAD_OPTIONS = [
    ({"activation": "relu"}, ValueError, ["activation = 'relu'", "swiglu"]),
    ({"activation_clamp": -1.0}, ValueError, ["activation_clamp = -1.0", "expected a positive number"]),
    ({"activation_clamp": "7"}, TypeError, ["activation_clamp = '7' (str)", "expected a number or None"]),
    ({"activation_alpha": 1e39}, ValueError, ["activation_alpha = 1e+39", "expected a finite number (FP32)"]),
    ({"activation_alpha": float("inf")}, ValueError, ["activation_alpha = inf", "expected a finite number"]),
    ({"save": "all"}, ValueError, ["save = 'all'", "expected one of ['recompute', 'preact']"]),
    ({"precision": "int8"}, ValueError, ["precision = 'int8'", "expected one of ['bf16', 'fp8', 'mxfp8', 'fp8_bwd']"]),
    ({"precision": "fp8", "backend": "cuda"}, NotImplementedError, ["precision = 'fp8'", "backend 'cuda' has no kernels for it"]),
    ({"backend": "triton"}, ValueError, ["backend = 'triton'", "expected None or one of ['reference', 'cuda', 'fused']"]),
    ({"buffer": None}, TypeError, ["buffer = NoneType", "expected a MegaMoeBuffer"]),
]


def assert_refused(call, exception, pieces):
    with pytest.raises(exception) as caught:
        call()
    for piece in pieces:
        assert piece in str(caught.value), str(caught.value)


@pytest.mark.parametrize("entry", ["mega_moe", "mega_moe_fwd"])
@pytest.mark.parametrize(("name", "spoil", "exception", "pieces"), BAD_TENSORS)
def test_bad_tensor(entry, name, spoil, exception, pieces, monkeypatch):
    good, buffer = make_inputs(dtype=torch.float32, bias=True), make_buffer()
    calls = count_calls(monkeypatch, buffer)
    bad = replace(good, **{name: spoil(getattr(good, name).clone())})
    biases = {"b13": bad.b13, "b2": bad.b2}
    assert_refused(lambda: getattr(deep_gemm, entry)(*bad.args, buffer, **biases), exception, pieces)
    assert not calls
    getattr(deep_gemm, entry)(*good.args, buffer, **good.biases)
    assert calls["gemm1"] == 1


@pytest.mark.parametrize("entry", ["mega_moe", "mega_moe_fwd"])
@pytest.mark.parametrize(("options", "exception", "pieces"), BAD_OPTIONS)
def test_bad_option(entry, options, exception, pieces, monkeypatch):
    inputs, buffer = make_inputs(), make_buffer()
    calls = count_calls(monkeypatch, buffer)
    options = {"buffer": buffer, **options}
    assert_refused(lambda: getattr(deep_gemm, entry)(*inputs.args, options.pop("buffer"), **options), exception, pieces)
    assert not calls


SETTINGS = {"num_experts": E, "num_max_tokens_per_rank": T, "num_topk": K, "hidden": H, "intermediate_hidden": I}


@pytest.mark.parametrize(
    ("change", "exception", "pieces"),
    [
        ({"num_experts": 0}, ValueError, ["num_experts = 0", "expected at least 1"]),
        ({"num_experts": 6.0}, TypeError, ["num_experts = 6.0 (float)", "expected an int"]),
        ({"num_max_tokens_per_rank": -1}, ValueError, ["num_max_tokens_per_rank = -1"]),
        ({"num_topk": 7}, ValueError, ["num_topk = 7", "expected 1..6 (num_experts = 6)"]),
        ({"num_topk": 17, "num_experts": 64}, ValueError, ["num_topk = 17", "expected 1..16"]),
        ({"precision": "fp4"}, ValueError, ["precision = 'fp4'"]),
        ({"capacity_factor": 0.0}, ValueError, ["capacity_factor = 0.0"]),
        ({"capacity_factor": "2"}, TypeError, ["capacity_factor = '2' (str)", "expected a number"]),
        ({"backend": ["cuda"]}, ValueError, ["backend = ['cuda']", "expected None or one of"]),
        ({"backend": "hip"}, ValueError, ["backend = 'hip'", "expected None or one of"]),
        ({"group": 3}, TypeError, ["group = 3 (int)", "torch.distributed.ProcessGroup"]),
        ({"device": "cuda", "hidden": 2000}, ValueError, ["hidden = 2000", "expected a multiple of 128 on CUDA; pad to 2048"]),
        ({"device": "cuda", "hidden": 128, "intermediate_hidden": 700}, ValueError, ["intermediate_hidden = 700", "pad to 768"]),
        (
            {"device": "cuda", "hidden": 128, "intermediate_hidden": 128, "precision": "fp8"},
            NotImplementedError,
            ["precision = 'fp8'", "backend 'cuda' has no kernels"],
        ),
        ({"backend": "cuda", "hidden": 128, "intermediate_hidden": 128}, deep_gemm.BackendUnavailable, ["the tensors are on cpu"]),
    ],
)
def test_bad_setting(change, exception, pieces):
    options = {"group": None, "device": "cpu", **SETTINGS, **change}
    assert_refused(lambda: deep_gemm.get_symm_buffer_for_mega_moe(options.pop("group"), **options), exception, pieces)


def test_experts_must_divide_over_the_ranks():
    class FourRanks(SingleGroup):
        size, name = 4, "four"

    assert_refused(
        lambda: deep_gemm.get_symm_buffer_for_mega_moe(FourRanks(), E, T, K, H, I, device="cpu"),
        ValueError,
        ["num_experts = 6", "expected a multiple of the number of ranks, 4"],
    )
    assert resolve_group(FourRanks()).size == 4


BAD_BACKWARD = [
    ({"dy": torch.zeros(T, H, dtype=torch.float64)}, TypeError, ["dy.dtype = torch.float64", "expected torch.float32"]),
    ({"dy": torch.zeros(T - 1, H)}, ValueError, ["dy.shape = (22, 10)", "expected (23, 10) = [T, hidden], as y"]),
    ({"dy": torch.zeros(H).expand(T, H)}, ValueError, ["dy is not contiguous", "pass dy.contiguous()"]),
    ({"dy": None}, TypeError, ["dy = NoneType"]),
    ({"state": None}, TypeError, ["state = NoneType", "expected the MegaMoeState"]),
    ({"needs": ("x", "w3")}, ValueError, ["needs = ('x', 'w3')", "'topk_weights'"]),
    ({"needs": None}, ValueError, ["needs = None", "expected a collection of names"]),
    ({"needs": "x"}, ValueError, ["needs = 'x'", "expected a collection of names"]),
    ({"wgrad_dtype": torch.float16}, TypeError, ["wgrad_dtype = torch.float16", "expected torch.bfloat16 or torch.float32"]),
    ({"wgrad_dtype": torch.float64}, TypeError, ["wgrad_dtype = torch.float64"]),
    ({"dw13": torch.zeros(E, 2 * I, H + 1)}, ValueError, ["dw13.shape = (6, 14, 11)", "expected (6, 14, 10)"]),
    ({"dw13": (torch.zeros(E, I, H),) * 2}, ValueError, ["dw13 has 2 part(s)", "expected 1"]),
    ({"dw2": torch.zeros(E, H, I, dtype=torch.float16)}, TypeError, ["dw2.dtype = torch.float16"]),
    ({"dw2": torch.zeros(E, I, H).transpose(1, 2)}, ValueError, ["dw2 is not contiguous"]),
    ({"dw2": torch.zeros(E, H, I, device="meta")}, ValueError, ["dw2.device = meta"]),
    ({"dw2": torch.zeros(E, H, I), "needs": ("x",)}, ValueError, ["dw2 was given", "lacks 'w2'"]),
    ({"dw2": torch.zeros(E, H, I), "accumulate": True}, ValueError, ["dw13 = None", "expected the tensor to add into"]),
]


@pytest.mark.parametrize(("change", "exception", "pieces"), BAD_BACKWARD)
def test_bad_backward(change, exception, pieces, monkeypatch):
    inputs, buffer = make_inputs(dtype=torch.float32), make_buffer()
    y, state = deep_gemm.mega_moe_fwd(*inputs.args, buffer)
    calls = count_calls(monkeypatch, buffer)
    options = {"dy": torch.ones_like(y), "state": state, **change}
    assert_refused(lambda: deep_gemm.mega_moe_bwd(options.pop("dy"), options.pop("state"), **options), exception, pieces)
    assert not calls
    deep_gemm.mega_moe_bwd(torch.ones_like(y), state)


@pytest.mark.parametrize(
    ("main_grads", "exception", "pieces"),
    [
        ({"w13": torch.zeros(w13_shape)}, ValueError, ["main_grads lacks ['w2']"]),
        ({"w1": torch.zeros(w13_shape)}, ValueError, ["main_grads has ['w1']", "expected names of weights of this call, ['w13', 'w2']"]),
        ({"w13": torch.zeros(w13_shape), "w2": torch.zeros(E, I, H)}, ValueError, ["main_grads['w2'].shape = (6, 7, 10)"]),
        ({"w13": (torch.zeros(E, I, H),) * 2, "w2": torch.zeros(E, H, I)}, ValueError, ["main_grads['w13'] has 2 part(s): expected 1"]),
        ({"w13": torch.zeros(w13_shape).half(), "w2": torch.zeros(E, H, I)}, TypeError, ["main_grads['w13'].dtype = torch.float16"]),
    ],
)
def test_bad_main_grads(main_grads, exception, pieces, monkeypatch):
    inputs, buffer = make_inputs(dtype=torch.float32).trainable(), make_buffer()
    calls = count_calls(monkeypatch, buffer)
    assert_refused(lambda: deep_gemm.mega_moe(*inputs.args, buffer, main_grads=main_grads), exception, pieces)
    assert not calls


def test_options_survive_their_encoding():
    buffer = make_buffer()
    for clamp, alpha in ((None, None), (7, 1.702), (1 / 3, 0.1), (float("inf"), -2.0)):
        decoded = checks.decode_options(checks.encode_options(buffer, "swiglu_oai", clamp, alpha, "preact", None, None))
        assert decoded.activation == checks.resolve_activation("swiglu_oai", clamp, alpha)
        assert (decoded.save, decoded.precision, decoded.backend) == ("preact", "bf16", "reference")


@pytest.mark.parametrize("clamp", [3.5e38, 1e300])
def test_clamp_beyond_fp32_is_none(clamp):
    inputs, buffer = make_inputs(dtype=torch.float32), make_buffer()
    assert torch.equal(deep_gemm.mega_moe(*inputs.args, buffer, activation_clamp=clamp), deep_gemm.mega_moe(*inputs.args, buffer))


@pytest.mark.parametrize(
    ("capability", "piece"), [((9, 0), None), ((10, 0), "10.0: sm_100 kernels do not exist yet"), ((8, 0), "8.0: kernels exist for sm_90")]
)
def test_compute_capability_is_named(monkeypatch, capability, piece):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    reason = cuda_missing(torch.device("cuda", 0))
    assert reason is None if piece is None else piece in reason


def test_old_driver_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "cuda_version", lambda: (12, 8))
    reason = cuda_missing(torch.device("cuda", 0))
    assert "driver is too old: it supports CUDA 12.8" in reason and "needs 13.0" in reason


def test_cuda_build_of_torch_on_a_machine_without_a_driver_is_no_error_of_its_own(monkeypatch):
    """What pip installs on any Linux machine: only the build is a stand-in here, the look for a driver is the real one."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no usable NVIDIA GPU or driver was found" in cuda_missing(torch.device("cuda", 0))


def test_process_group_gives_addresses_of_torch_symmetric_memory(monkeypatch):
    """Torch puts small tensors of symmetric memory into one segment, whose beginning is all that its handle tells of the peers.

    The glue only: torch's allocator and rendezvous are stand-ins, as the real ones need GPUs."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric_memory

    from deep_gemm.mega.groups import ProcessGroupAdapter

    group = SimpleNamespace(group_name="ep")
    seen, steps = {}, []
    memory = torch.full((64,), 7, dtype=torch.uint8)
    own = memory.data_ptr()
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)

    def gather(values, value, group):
        steps.append(("gather", bool(memory.any())))
        values[:] = [1024, value]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "barrier", lambda group: steps.append(("barrier", bool(memory.any()))))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: steps.append(("synchronize", bool(memory.any()))))
    monkeypatch.setattr(symmetric_memory, "empty", lambda nbytes, dtype, device: seen.update(asked=(nbytes, dtype, str(device))) or memory)
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda tensor, group: SimpleNamespace(buffer_ptrs=[4096, own - 512], owner=(tensor, group)))
    tensor, addresses = ProcessGroupAdapter(group).symmetric_empty(64, torch.device("cuda", 1))
    assert tensor is memory and addresses == [4096 + 1024, own]
    assert seen == {"asked": (64, torch.uint8, "cuda:1")}
    # Peers have finished with what the memory was before, then it is cleared, then they may write: (step, still dirty).
    assert steps == [("synchronize", True), ("gather", True), ("synchronize", False), ("barrier", False)]


def test_device_of_the_buffer_is_made_current(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    for device in ("cpu", "cuda:0", "cuda:1"):
        with on_device(torch.device(device)):
            pass
    assert entered == [torch.device("cuda", 1)]


def misaligned(*shape: int) -> torch.Tensor:
    return torch.zeros(1 + math.prod(shape), dtype=torch.bfloat16)[1:].view(shape)


@pytest.mark.parametrize("name", ["x", "w13", "w2", "b13", "b2", "dy"])
def test_address_that_the_kernels_cannot_read_is_named(name):
    good = torch.zeros(8, 128, dtype=torch.bfloat16)
    checks.check_alignment(**{name: (good, good[1:])})
    with pytest.raises(ValueError, match=rf"^{name}\.data_ptr\(\) = 0x\w+2: expected an address that is a multiple of 16 bytes"):
        checks.check_alignment(**{name: (good, misaligned(8, 128))})


@pytest.mark.parametrize("main_grads", [False, True])
def test_gradient_that_is_a_slice_of_another_reaches_the_backend_aligned(main_grads, monkeypatch):
    inputs, buffer, seen = make_inputs().trainable(), make_buffer(), []
    backend = buffer.backend("reference")
    run = backend.backward
    monkeypatch.setattr(backend, "backward", lambda problem, dy, *rest: seen.append(dy) or run(problem, dy, *rest))
    targets = {"main_grads": {"w13": torch.zeros_like(inputs.w13), "w2": torch.zeros_like(inputs.w2)}} if main_grads else {}
    y = deep_gemm.mega_moe(*inputs.args, buffer, **targets)
    dy = torch.randn(1 + y.numel(), dtype=y.dtype)
    torch.cat((torch.ones(1, dtype=y.dtype), y.flatten())).backward(dy)
    assert dy[1:].data_ptr() % 16 and seen[0].data_ptr() % 16 == 0
    assert seen[0].equal(dy[1:].view(y.shape))
