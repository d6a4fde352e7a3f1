"""prime-rl's adapter in one process: which settings and layers are refused and in which words, the bound on T, names of prime-rl's drafts."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch
from prime_rl_contract import ClampedSwiglu, E, GroupedExperts, H, I, K, MoE, OldMoE, ParallelDims, Relu2, Router, Silu, fill, model_config
from torch import nn

import deep_gemm
from deep_gemm.integrations import prime_rl


class OneRankMesh:
    """Checks come before the group is asked for."""

    device_type = "cpu"

    def __getitem__(self, name):
        return self

    def get_group(self):
        raise AssertionError("a check that needs no group came too late")


REFUSED = {
    "ep": (model_config(ep=1), ValueError, r"model\.ep = 1: .* needs expert parallelism, model\.ep > 1"),
    "lora": (model_config(lora=object()), ValueError, "model.lora is set: mega_moe has no LoRA"),
    "dispatch": (model_config(type="deepep"), ValueError, r"model\.moe\.dispatch\.type = 'deepep': expected \"mega_moe\""),
    "backend": (
        model_config(compute={"backend": "sonicmoe"}),
        ValueError,
        r"model\.moe\.compute\.backend = 'sonicmoe'.*expected \"torch\"",
    ),
    "tokens": (model_config(max_tokens_per_rank=0), ValueError, r"model\.moe\.dispatch\.max_tokens_per_rank = 0: expected at least 1"),
    "save": (model_config(save="all"), ValueError, r"model\.moe\.dispatch\.save = 'all': expected one of \['recompute', 'preact'\]"),
    "backward": (
        model_config(backward_precision="fp8"),
        NotImplementedError,
        r"dispatch\.backward_precision = 'fp8'.*supported now: .*'bf16'",
    ),
    "draft fp8": (model_config(fp8=True), NotImplementedError, r"model\.moe\.dispatch\.fp8 = True: .*expected False; supported now"),
    "held wgrads": (model_config(fused_wgrad_micro_batches=2), NotImplementedError, r"fused_wgrad_micro_batches = 2: .*expected 1"),
}
for _type in ("deepgemm_fp8", "mxfp8", "nvfp4"):
    REFUSED[_type] = (
        model_config(compute={"type": _type}),
        NotImplementedError,
        rf"model\.moe\.compute\.type = '{_type}': .*supported now: model\.moe\.compute\.type = 'bf16'",
    )


@pytest.mark.parametrize("case", REFUSED)
def test_refused_setting_is_named_with_what_is_supported(case):
    config, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        prime_rl.check_settings(config)
    with pytest.raises(error, match=message):
        ep = config.ep if config.ep == 1 else 2
        prime_rl.configure_mega_moe(MoE(GroupedExperts()), config, ParallelDims(OneRankMesh(), ep))


def test_settings_that_fit_pass():
    prime_rl.check_settings(model_config())
    prime_rl.check_settings(
        model_config(ep="auto", backward_precision="bf16", fp8=False, fused_wgrad_micro_batches=1, max_tokens_per_rank=5)
    )
    with pytest.raises(ValueError, match="model.ep = 1"):
        prime_rl.check_settings(model_config(ep="auto"), ep=1)


def non_gated() -> GroupedExperts:
    experts = GroupedExperts("separate")
    experts.gate_proj = None
    return experts


def old_non_gated() -> GroupedExperts:
    experts = GroupedExperts("w123")
    experts.w3 = nn.Parameter(torch.empty(0))
    return experts


def oai(gate, up):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


LAYERS = {
    "score before": (lambda: MoE(GroupedExperts(), score_before_experts=True), "score_before_experts = True"),
    "bias": (lambda: MoE(GroupedExperts(bias=True)), r"biases \['down_proj_bias'\]"),
    "non-gated": (lambda: MoE(non_gated()), r"parameters \['up_proj', 'down_proj'\]: expected gated experts"),
    "non-gated, up to 0.8": (lambda: OldMoE(old_non_gated()), r"shapes \[\(8, 128, 256\), \(0,\), \(8, 256, 128\)\]"),
    "relu2": (lambda: MoE(GroupedExperts(activation=Relu2)), r"activation = Relu2: expected silu\(gate\) \* up"),
    "gpt-oss": (
        lambda: MoE(GroupedExperts(activation=type("Clamped", (), {"limit": 7.0, "apply": staticmethod(oai)}))),
        "activation = Clamped",
    ),
    "no activation": (lambda: MoE(GroupedExperts(activation="gelu")), "activation = str: expected silu"),
}


@pytest.mark.parametrize("case", LAYERS)
def test_layer_that_does_not_fit_is_named(case):
    make, message = LAYERS[case]
    model = nn.ModuleDict({"mlp": make()})
    with pytest.raises(ValueError, match="layer 'mlp': .*" + message):
        prime_rl.configure_mega_moe(model, model_config(), ParallelDims(OneRankMesh(), 2))


def test_number_of_experts_and_shapes_are_checked():
    with pytest.raises(ValueError, match="layer 'mlp': num_experts = 8: expected a multiple of model.ep = 3"):
        prime_rl.configure_mega_moe(nn.ModuleDict({"mlp": MoE(GroupedExperts())}), model_config(ep=3), ParallelDims(OneRankMesh(), 3))
    for shape, message in (((24, 128), "hidden = 24"), ((128, 100), "intermediate_hidden = 100")):
        odd = nn.ModuleDict({"mlp": MoE(GroupedExperts(hidden=shape[0], intermediate_hidden=shape[1]))})
        with pytest.raises(ValueError, match=f"layer 'mlp': {message}: expected a multiple of 128 on CUDA"):
            prime_rl.configure_mega_moe(odd, model_config(), ParallelDims(OneRankMesh(), 2), device="cuda")
    with pytest.raises(ValueError, match="no MoE layers of prime-rl's own implementation"):
        prime_rl.configure_mega_moe(nn.Linear(2, 2), model_config(), ParallelDims(OneRankMesh(), 2))


def test_clamp_is_found():
    assert prime_rl._activation_clamp(GroupedExperts(activation=Silu)) is None
    assert prime_rl._activation_clamp(GroupedExperts(activation=ClampedSwiglu(7.0))) == 7.0


def test_experts_over_several_hosts_are_refused():
    class Group:
        rank, size, name = 0, 2, "fake"
        symmetric_empty = None

        def all_gather_object(self, value):
            return [value, "another-host"]

    with pytest.raises(ValueError, match=r"model\.ep: the ranks of one expert-parallel group are on 2 hosts, .*another-host"):
        prime_rl._check_one_host(Group())


def test_one_rank_is_refused():
    with pytest.raises(ValueError, match=r"group has 1 rank: .*model\.ep > 1"):
        prime_rl.MegaMoETokenDispatcher(E, K, H, I, None, 16, device="cpu")


@pytest.mark.parametrize(
    ("config", "micro_batch_size", "bound"),
    [
        (model_config(seq_len=100), 1, 100),
        (model_config(seq_len=100), 3, 300),
        (model_config(seq_len=100, cp=4), 2, 52),  # padded to 104
        (model_config(seq_len=100, max_tokens_per_rank=7), 3, 7),
    ],
)
def test_bound_on_tokens(config, micro_batch_size, bound):
    assert prime_rl.max_tokens_per_rank(config, micro_batch_size) == bound


def test_import_needs_no_trainer():
    code = "import sys; import deep_gemm.integrations.prime_rl; print([m for m in ('prime_rl', 'pydantic', 'torchtitan', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=deep_gemm.__path__[0] + "/..")
    assert result.stdout.strip() == "[]"


# The names and arguments that the drafts' adapter calls, as it calls them: outputs by position, options by keyword.


def test_draft_names_are_those_of_deep_gemm():
    for name in ("bf16_mega_moe", "bf16_mega_moe_backward", "get_symm_buffer_for_mega_moe", "set_num_sms"):
        assert getattr(deep_gemm, name) is getattr(prime_rl, name)
    assert not hasattr(deep_gemm, "fp8_mega_moe_backward")  # its presence is how a draft asks for FP8
    with pytest.raises(NotImplementedError, match="fp8_mega_moe_backward: there are no FP8 kernels yet"):
        prime_rl.fp8_mega_moe_backward(None, None)


@pytest.mark.parametrize(
    ("name", "positional", "keywords"),
    [
        (
            "get_symm_buffer_for_mega_moe",
            ["group", "num_experts", "num_max_tokens_per_rank", "num_topk", "hidden", "intermediate_hidden"],
            ["mma_type"],
        ),
        ("bf16_mega_moe", ["y", "l1_weights", "l2_weights", "sym_buffer"], ["activation_clamp"]),
        ("bf16_mega_moe_backward", ["dx", "dw1", "dw2", "dtopk", "dy", "l1_weights", "l2_weights", "sym_buffer"], ["activation_clamp"]),
        ("set_num_sms", ["num_sms"], []),
    ],
)
def test_draft_argument_names(name, positional, keywords):
    parameters = inspect.signature(getattr(deep_gemm, name)).parameters
    assert list(parameters)[: len(positional)] == positional
    assert all(parameters[keyword].default is None for keyword in keywords)
    assert all(parameter.default is not parameter.empty for parameter in list(parameters.values())[len(positional) :])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_draft_calls_forward_and_backward(dtype, clamp):
    """Inputs copied into the buffer before each call, as the drafts do; the same bits as mega_moe_fwd and mega_moe_bwd."""
    tokens, experts = 11, fill(GroupedExperts(), dtype=torch.bfloat16).requires_grad_(False)
    l1, l2 = experts.gate_up_proj, experts.down_proj
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, E, tokens + 3, K, H, I, mma_type="bf16xbf16", device="cpu")
    assert buffer.mma_type == "bf16xbf16"
    x, dy = torch.randn(2, tokens, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    scores, ids, *_ = fill(Router())(x)
    ids[2, 1] = -1

    def stage(rows):
        buffer.x[:tokens].copy_(rows)
        buffer.topk_idx[:tokens].copy_(ids.view(tokens, buffer.num_topk))
        buffer.topk_weights[:tokens].copy_(scores.detach().view(tokens, buffer.num_topk))

    y, dx = torch.full((2, tokens, H), float("nan"), dtype=torch.bfloat16)
    dw1, dw2 = (torch.full(weight.shape, float("nan"), dtype=dtype) for weight in (l1, l2))
    dtopk = torch.full((tokens, K), float("nan"))
    stage(x)
    deep_gemm.bf16_mega_moe(y, l1, l2, buffer, activation_clamp=clamp)
    stage(dy)  # another layer used the buffer in between
    stage(x)
    deep_gemm.bf16_mega_moe_backward(dx, dw1, dw2, dtopk, dy, l1, l2, buffer, activation_clamp=clamp)
    expected, state = deep_gemm.mega_moe_fwd(x, ids, scores.detach(), l1, l2, buffer, activation_clamp=clamp)
    gradients = deep_gemm.mega_moe_bwd(dy, state, wgrad_dtype=dtype)
    assert torch.equal(y, expected)
    for actual, want in zip((dx, dtopk, dw1, dw2), gradients, strict=True):
        assert torch.equal(actual, want)


def test_draft_calls_refuse_what_they_cannot_do():
    for mma_type, precision in (("fp8xfp8", "bf16"), ("bf16xbf16", "fp8")):
        with pytest.raises(
            NotImplementedError, match=f"mma_type = '{mma_type}' with precision = '{precision}': expected None, or 'bf16xbf16'"
        ):
            deep_gemm.get_symm_buffer_for_mega_moe(None, E, 4, K, H, I, mma_type=mma_type, precision=precision, device="cpu")
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(None, E, 4, K, H, I, device="cpu")
    l1, l2 = torch.zeros(E, 2 * I, H).bfloat16(), torch.zeros(E, H, I).bfloat16()
    dy = torch.zeros(4, H).bfloat16()
    with pytest.raises(ValueError, match=r"dtopk: torch.bfloat16 \(4, 3\), expected torch.float32 \(4, 3\)"):
        deep_gemm.bf16_mega_moe_backward(dy, l1, l2, torch.zeros(4, K).bfloat16(), dy, l1, l2, buffer)
    with pytest.raises(ValueError, match=r"dx: torch.bfloat16 \(3, 256\), expected torch.bfloat16 \(4, 256\)"):
        deep_gemm.bf16_mega_moe_backward(dy[:3], l1, l2, torch.zeros(4, K), dy, l1, l2, buffer)
