"""The overrides on TorchTitan's config trees: what they claim and keep, what is refused and how; no process group."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan needs Python >= 3.11")

from titan_support import MEGA_MOE, SELECTIVE_AC, Job, Run, Setup, Shape, batches, deepseek_v3, mega_moe_import, qwen3
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import gpt_oss
from torchtitan.models.common.moe import RoutedExperts

import deep_gemm.integrations.torchtitan as integration
from deep_gemm.mega import ops


def apply(config, *imports):
    apply_overrides(OverrideConfig(imports=list(imports)), config)
    return config


def routed(config) -> list:
    return [layer.moe.routed_experts for layer in config.layers if layer.moe is not None]


def test_command_line_names_every_layer_and_its_options():
    imports = parse_cli_imports([MEGA_MOE + '={"num_max_tokens_per_rank": 64, "save": "preact"}', SELECTIVE_AC])
    job = apply(Job.Config(model=deepseek_v3(Shape()), activation_checkpoint=SelectiveAC.Config()), *imports)
    (experts,) = routed(job.model)  # the first layer is dense
    assert isinstance(experts, integration.MegaMoeRoutedExperts.Config)
    assert (experts.num_max_tokens_per_rank, experts.save, experts.token_dispatcher.top_k) == (64, "preact", 2)
    assert {ops.gemm1, ops.gemm2} <= job.activation_checkpoint.build().get_save_ops()


def test_parameters_and_their_initialisation_stay():
    own, mine = (Run(Setup(experts=experts, parallel=False)) for experts in ("own", "mega_moe"))
    expected, state = own.model.state_dict(), mine.model.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert any(name.endswith("moe.routed_experts.inner_experts.w1_EFD") for name in state)


def test_layers_share_one_buffer_that_is_there_before_the_first_forward():
    run = Run(Setup(parallel=False))
    buffers = {module.buffer for module in run.model.modules() if isinstance(module, integration.MegaMoeRoutedExperts)}
    (buffer,) = buffers
    assert (buffer.num_experts, buffer.num_topk, buffer.hidden, buffer.intermediate_hidden, buffer.num_ranks) == (8, 2, 16, 16, 1)
    assert buffer.generation == 0


def test_forward_before_the_states_are_made_says_what_is_missing():
    config = apply(qwen3(Shape()), mega_moe_import())
    experts = routed(config)[0].build()
    with pytest.raises(RuntimeError, match=r"buffer = None: expected init_states \(or make_buffer\) before the first forward"):
        experts(torch.zeros(1, 2, 16), torch.zeros(1, 2, 2), torch.zeros(1, 2, 2, dtype=torch.int64), torch.zeros(8))


def test_buffer_is_not_made_on_the_meta_device():
    config = apply(qwen3(Shape()), mega_moe_import())
    with torch.device("meta"):
        experts = routed(config)[0].build()
    experts.init_states()
    assert experts.buffer is None


def test_a_second_forward_of_fewer_tokens_and_inference():
    run = Run(Setup(parallel=False))
    batch = next(batches())
    with torch.no_grad():
        both = run.model.eval()(batch[:, :-1])
        one = run.model(batch[:1, :5])
    torch.testing.assert_close(one, both[:1, :5])


def test_scores_in_bf16_are_taken():
    """As a router in BF16 gives them on the CPU, where autocast to FP32 does nothing."""
    run = Run(Setup(parallel=False, dtype="bfloat16"))
    model = run.model.bfloat16()
    assert torch.isfinite(model(next(batches())[:, :-1]).float()).all()


def test_bound_on_tokens_comes_from_a_dispatcher_that_has_one():
    config = qwen3(Shape(), comm_backend="deepep")
    for experts in routed(config):
        experts.token_dispatcher.num_max_tokens_per_rank = 48  # TorchTitan fills it from the training config
    assert [experts.num_max_tokens_per_rank for experts in routed(apply(config, MEGA_MOE))] == [48, 48]
    with pytest.raises(ValueError, match=r"num_max_tokens_per_rank = None: expected the bound .* local_batch_size \* seq_len"):
        apply(qwen3(Shape()), MEGA_MOE)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_max_tokens_per_rank": 0}, ValueError, "num_max_tokens_per_rank = 0: expected an int of at least 1"),
        ({"save": "everything"}, ValueError, "save = 'everything': expected one of"),
        ({"dtype": "float16"}, ValueError, "dtype = 'float16': expected one of"),
        ({"capacity": 2}, ValueError, "capacity"),
    ],
)
def test_bad_option_is_named_when_the_overrides_are_applied(options, error, message):
    with pytest.raises(error, match=message):
        apply(qwen3(Shape()), mega_moe_import(**options))


def test_what_computes_something_else_is_refused():
    oss = gpt_oss.gptoss_configs["debugmodel"](moe_comm_backend="standard")
    with pytest.raises(NotImplementedError, match="inner_experts = GptOssGroupedExperts.Config: expected GroupedExperts.Config itself"):
        apply(oss, mega_moe_import())
    dropping = qwen3(Shape(), comm_backend="hybridep")
    for experts in routed(dropping):
        experts.token_dispatcher.non_blocking_capacity_factor = 0.5
    with pytest.raises(NotImplementedError, match="non_blocking_capacity_factor is set: expected None"):
        apply(dropping, mega_moe_import())
    with pytest.raises(NotImplementedError, match="token_dispatcher = MinimalAsyncEPTokenDispatcher.Config: expected one of"):
        apply(qwen3(Shape(), comm_backend="minimal_async_ep"), mega_moe_import())
    with pytest.raises(NotImplementedError, match="routed_experts = MegaMoeRoutedExperts.Config: expected RoutedExperts.Config itself"):
        apply(apply(qwen3(Shape()), mega_moe_import()), mega_moe_import())


def test_another_override_of_the_experts_is_a_conflict():
    with pytest.raises(ValueError, match="mega_moe.* claims .* an ancestor of"):
        apply(qwen3(Shape()), mega_moe_import(), "titan_support.fp32_experts")


def test_other_checkpointing_policies_are_left_alone_or_told_what_to_do():
    job = apply(Job.Config(model=qwen3(Shape()), activation_checkpoint=FullAC.Config()), mega_moe_import(), SELECTIVE_AC)
    assert type(job.activation_checkpoint) is FullAC.Config
    own = integration.MegaMoeSelectiveAC.Config()
    with pytest.raises(
        NotImplementedError, match=r"activation_checkpoint = MegaMoeSelectiveAC.Config: .* add .*save_ops\(\) to what its get_save_ops"
    ):
        apply(Job.Config(model=qwen3(Shape()), activation_checkpoint=own), SELECTIVE_AC)


def test_options_of_selective_checkpointing_stay():
    policy = SelectiveAC.Config(preserve_rng_state=False, force_recompute_mm_shapes_by_fqns=[])
    job = apply(Job.Config(model=qwen3(Shape()), activation_checkpoint=policy), (SELECTIVE_AC, {"keep_activations": False}))
    assert (job.activation_checkpoint.preserve_rng_state, job.activation_checkpoint.force_recompute_mm_shapes_by_fqns) == (False, [])
    saved = job.activation_checkpoint.build().get_save_ops()
    assert ops.gemm2 in saved and ops.gemm1 not in saved


def test_without_torchtitan_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    for name in [name for name in sys.modules if name.startswith("torchtitan.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "deep_gemm.integrations.torchtitan")
    with pytest.raises(ImportError, match=r"needs torchtitan 0.3.0 and triton .pip install torchtitan==0.3.0"):
        importlib.import_module("deep_gemm.integrations.torchtitan")


def test_arguments_have_the_names_that_the_sharding_config_refers_to():
    assert (
        inspect.signature(integration.MegaMoeRoutedExperts.forward).parameters.keys()
        == inspect.signature(RoutedExperts.forward).parameters.keys()
    )
