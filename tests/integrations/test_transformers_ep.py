"""transformers' Qwen3-MoE over 2 and 4 gloo processes: experts sharded over `ep`, FSDP2 over the rest, against the eager model on one rank.

Each set of processes runs all scenarios of its size and reports on each.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import time
import traceback
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers (the test extra of pyproject.toml)")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from hf_models import SEQUENCE, assert_gradients, batch, loss_of, make_model, mean_gradients, relative
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import deep_gemm.integrations.transformers as hf

TOKENS = 2 * SEQUENCE
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "finetune_qwen3_moe.py"


def whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}


def mesh_of(fsdp: int, ep: int):
    return init_device_mesh("cpu", (fsdp, ep), mesh_dim_names=("fsdp", "ep"))


def sharded(fsdp: int, ep: int, *, prepare=None, model=None, **options) -> torch.nn.Module:
    mesh = mesh_of(fsdp, ep)
    model = make_model("mega_moe") if model is None else model
    hf.shard_experts(model, mesh["ep"], num_max_tokens_per_rank=TOKENS)
    if prepare is not None:
        prepare(model)
    return hf.apply_fsdp(model, mesh, **options)


def expected(prepare=None) -> dict[str, torch.Tensor]:
    model = make_model("eager")
    if prepare is not None:
        prepare(model)
    return mean_gradients(model, [batch(rank) for rank in range(dist.get_world_size())])


def check(fsdp: int, ep: int, *, prepare=None, after=None, reference=None) -> None:
    """Logits of this rank's batch and the mean of all ranks' gradients, in FP32."""
    model = sharded(fsdp, ep, prepare=prepare)
    run = after(model) if after is not None else model
    ids = batch(dist.get_rank())
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, make_model("eager")(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    loss_of(run, ids).backward()
    assert_gradients(gradients(model), expected(reference))


def expert_gradients_are_sums_without_fsdp():
    model = make_model("mega_moe")
    hf.shard_experts(model, dist.group.WORLD, num_max_tokens_per_rank=TOKENS)
    loss_of(model, batch(dist.get_rank())).backward()
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(parameter.grad)
    count = dist.get_world_size()
    assert_gradients(gradients(model), {name: count * gradient for name, gradient in expected().items()})


def ranks_may_have_different_tokens_and_none_of_some_experts():
    model = make_model("mega_moe")
    hf.shard_experts(model, dist.group.WORLD, num_max_tokens_per_rank=TOKENS)
    rank = dist.get_rank()
    loss_of(model, batch(rank)[: 1 + rank % 2, : 4 + rank]).backward()
    reference = make_model("eager")
    for other in range(dist.get_world_size()):
        loss_of(reference, batch(other)[: 1 + other % 2, : 4 + other]).backward()
    of_experts = lambda made: {name: value for name, value in made.items() if ".experts." in name}
    assert_gradients(of_experts(gradients(model)), of_experts({name: p.grad for name, p in reference.named_parameters()}))


def transformers_own_expert_parallelism_computes_with_it():
    """Its exchange, our experts: local ids, and num_experts for those of other ranks (all_reduce)."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism  # not in older releases, which collect this file too

    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
    for implementation, tp_mesh, mine in (("all_to_all", mesh["tp"], rank), ("all_reduce", mesh["ep"], 0)):
        model = make_model("mega_moe")
        plan = {}
        for name, _ in hf.experts_modules(model):
            plan |= {f"{name}.gate_up_proj": "grouped_gemm", f"{name}.down_proj": "grouped_gemm", name: "ep_dispatch_experts"}
        apply_expert_parallelism(model, mesh["ep"], tp_mesh, plan, implementation)
        logits = model(input_ids=batch(mine)).logits
        torch.testing.assert_close(logits, make_model("eager")(input_ids=batch(mine)).logits, rtol=1e-5, atol=1e-5)
        loss_of(model, batch(mine)).backward()
        reference = mean_gradients(
            make_model("eager"), [batch(other) for other in (range(world) if implementation == "all_to_all" else [0])]
        )
        of_experts = {name: value for name, value in gradients(model).items() if ".experts." in name}
        scale = world if implementation == "all_to_all" else 1
        assert_gradients(of_experts, {name: scale * value for name, value in reference.items() if ".experts." in name})


def full_checkpointing(model) -> None:
    model.train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})


def selective_checkpointing(model) -> None:
    def keep(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in hf.SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    model.train()
    context = functools.partial(create_selective_checkpoint_contexts, keep)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False, "context_fn": context})


def freeze(*parts: str):
    def prepare(model) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in parts))

    return prepare


def compiled_layer(model) -> torch.nn.Module:
    model.model.layers[0].compile(backend="aot_eager")
    return model


def main_gradients_accumulate_in_fp32():
    count = dist.get_world_size()
    model = sharded(1, count, prepare=hf.enable_main_grads)
    mine = [batch(dist.get_rank()), batch(dist.get_rank() + count)]
    for step in range(2):  # the second step starts from zero again
        model.zero_grad()
        for position, ids in enumerate(mine):
            model.set_requires_gradient_sync(position == 1)
            (loss_of(model, ids) / 2).backward()
        assert all(p.grad is None for name, p in model.named_parameters() if ".experts." in name)
        hf.publish_main_grads(model, divide_factor=count)
        assert_gradients(gradients(model), mean_gradients(make_model("eager"), [batch(index) for index in range(2 * count)]))
        hf.zero_main_grads(model)


def main_gradients_of_bf16_parameters_do_not_round():
    """The FP32 sum of micro-batches, where adding in BF16 would lose bits."""
    model = make_model("mega_moe", dtype=torch.bfloat16)
    hf.shard_experts(model, dist.group.WORLD, num_max_tokens_per_rank=TOKENS)
    hf.enable_main_grads(model)
    weight = model.model.layers[0].mlp.experts.down_proj
    parts = []
    for index in range(3):
        before = weight.main_grad.clone()
        loss_of(model, batch(10 * index + dist.get_rank())).backward()
        parts.append(weight.main_grad - before)
    assert weight.main_grad.dtype == torch.float32 and all(part.abs().max() > 0 for part in parts)
    assert not torch.equal(weight.main_grad, weight.main_grad.bfloat16().float())
    total = weight.main_grad.clone()
    hf.publish_main_grads(model, divide_factor=2.0)
    assert weight.grad.dtype == torch.bfloat16 and torch.equal(weight.grad.to_local(), (total / 2).bfloat16())


def accumulation_with_fsdp():
    count = dist.get_world_size()
    model = sharded(2, count // 2)
    for position, index in enumerate((dist.get_rank(), dist.get_rank() + count)):
        model.set_requires_gradient_sync(position == 1)
        (loss_of(model, batch(index)) / 2).backward()
    assert_gradients(gradients(model), mean_gradients(make_model("eager"), [batch(index) for index in range(2 * count)]))


def clipping_uses_one_norm():
    count = dist.get_world_size()
    for fsdp, ep in {(2, count // 2), (1, count)}:
        for max_norm, norm_type in ((0.05, 2.0), (1e3, 2.0), (0.01, float("inf"))):
            model = sharded(fsdp, ep)
            loss_of(model, batch(dist.get_rank())).backward()
            norm = hf.clip_grad_norm_(model.parameters(), max_norm, norm_type)
            reference = make_model("eager")
            mean_gradients(reference, [batch(rank) for rank in range(count)])
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type), rtol=1e-5, atol=0)
            assert_gradients(gradients(model), {name: p.grad for name, p in reference.named_parameters()})


def mixed_precision_errs_no_more_than_the_eager_bf16_model():
    """FP32 parameters, BF16 computation; against the FP32 model of the rounded weights."""
    rank, batches = dist.get_rank(), [batch(other) for other in range(dist.get_world_size())]
    bf16 = make_model("eager", dtype=torch.bfloat16)
    truth, rounded = mean_gradients(copy.deepcopy(bf16).float(), batches), mean_gradients(bf16, batches)
    model = make_model("mega_moe", dtype=torch.bfloat16).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(2, dist.get_world_size() // 2, model=model, mp_policy=policy)
    loss_of(model, batch(rank)).backward()
    made = gradients(model)
    assert made.keys() == truth.keys() and all(gradient.dtype == torch.float32 for gradient in made.values())
    errors = {name: (relative(made[name], truth[name]), relative(rounded[name], truth[name])) for name in made}
    wrong = {name: pair for name, pair in errors.items() if not pair[0] <= 1.5 * pair[1] + 2e-3}
    assert not wrong, f"(error, the eager model's): {wrong}"


def rows_are_sharded_where_experts_do_not_divide():
    """3 experts of a rank over 2 ranks of fsdp."""
    count = dist.get_world_size()
    model = sharded(2, count // 2, model=make_model("mega_moe", num_experts=3 * count // 2))
    loss_of(model, batch(dist.get_rank())).backward()
    reference = make_model("eager", num_experts=3 * count // 2)
    assert_gradients(gradients(model), mean_gradients(reference, [batch(rank) for rank in range(count)]))
    state = hf.full_state_dict(model)
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in state.items())


def plain_fsdp_needs_no_set_up():
    model = make_model("mega_moe")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    loss_of(model, batch(dist.get_rank())).backward()
    assert_gradients(gradients(model), expected())


def full_state_dict_both_ways(folder):
    reference = make_model("eager", seed=3)
    model = sharded(2, dist.get_world_size() // 2)
    hf.load_full_state_dict(model, reference.state_dict())
    ids = batch(0)
    torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    made = hf.full_state_dict(model)
    if dist.get_rank() == 0:
        assert made.keys() == reference.state_dict().keys()
        assert all(torch.equal(made[name], value) for name, value in reference.state_dict().items())
        model.save_pretrained(f"{folder}/pretrained", state_dict=made)
        again = type(reference).from_pretrained(f"{folder}/pretrained", experts_implementation="eager")
        assert all(torch.equal(again.state_dict()[name], value) for name, value in reference.state_dict().items())
    else:
        assert not made
    dist.barrier()
    # A sharded model from the files of an unsharded one.
    loaded = type(reference).from_pretrained(f"{folder}/pretrained", experts_implementation="mega_moe")
    loaded = sharded(1, dist.get_world_size(), model=loaded)
    torch.testing.assert_close(loaded(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def steps(model, optimizer, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        loss = loss_of(model, batch(1000 * step + dist.get_rank()))
        loss.backward()
        hf.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    return losses


def training_resumes_at_another_ep_size(folder):
    """Model and AdamW state through torch.distributed.checkpoint, written and read at different EP sizes."""
    count = dist.get_world_size()
    layouts = [(2, count // 2), (1, count), (count, 1)]
    model = sharded(*layouts[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 0, 3)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    straight = steps(model, optimizer, 3, 4)
    for layout in layouts[1:]:
        other = sharded(*layout, model=make_model("mega_moe", seed=9))
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        state = dict(zip(("model", "optimizer"), get_state_dict(other, other_optimizer)))
        dcp.load(state, checkpoint_id=f"{folder}/dcp")
        set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        resumed = steps(other, other_optimizer, 3, 4)
        torch.testing.assert_close(torch.tensor(resumed), torch.tensor(straight), rtol=1e-4, atol=0)


def fifty_steps_follow_the_eager_model():
    count = dist.get_world_size()
    reference = make_model("eager", num_hidden_layers=1)
    model = sharded(1, count, model=make_model("mega_moe", num_hidden_layers=1))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=3e-3) for each in (model, reference)]
    ours = steps(model, optimizers[0], 0, 50)
    theirs = []
    for step in range(50):
        losses = [loss_of(reference, batch(1000 * step + rank)) for rank in range(count)]
        (sum(losses) / count).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizers[1].step()
        optimizers[1].zero_grad()
        theirs.append(sum(losses).item() / count)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-3, atol=0)
    assert ours[-1] < 0.7 * ours[0]


def the_example_resumes_at_another_ep_size(folder):
    spec = importlib.util.spec_from_file_location("finetune_qwen3_moe", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def train(*arguments: str) -> list[float]:
        return example.train(example.arguments(["--batch", "2", "--sequence", "32", *arguments]), torch.device("cpu"))

    straight = train("--ep", "2", "--steps", "5")
    first = train("--ep", "2", "--steps", "3", "--save", f"{folder}/example")
    resumed = train("--ep", "1", "--steps", "2", "--resume", f"{folder}/example")
    torch.testing.assert_close(torch.tensor(first + resumed), torch.tensor(straight), rtol=1e-2, atol=0)
    assert straight[-1] < straight[0]


def models_on_meta_are_sharded_before_they_have_memory():
    """For models that no rank can hold whole: shard on meta, then to_empty, then load."""
    reference, mesh = make_model("eager", seed=5), mesh_of(1, dist.get_world_size())
    with torch.device("meta"):
        model = make_model("mega_moe", initialise=False)
    hf.shard_experts(model, mesh["ep"], num_max_tokens_per_rank=TOKENS, device="cpu")
    hf.apply_fsdp(model, mesh).to_empty(device="cpu")
    for (_, buffer), (_, original) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        buffer.copy_(original)  # not part of a state dict
    hf.load_full_state_dict(model, reference.state_dict())
    ids = batch(dist.get_rank())
    torch.testing.assert_close(model(input_ids=ids).logits, reference(input_ids=ids).logits, rtol=1e-5, atol=1e-5)


def misuse_is_named():
    count = dist.get_world_size()
    model = make_model("eager")
    with pytest.raises(ValueError, match="experts_implementation = 'eager'; expected 'mega_moe'"):
        hf.shard_experts(model, dist.group.WORLD, num_max_tokens_per_rank=TOKENS)
    with pytest.raises(ValueError, match=f"num_experts = 3; expected a multiple of the number of ranks, {count}"):
        hf.shard_experts(make_model("mega_moe", num_experts=3), dist.group.WORLD, num_max_tokens_per_rank=TOKENS)
    model = make_model("mega_moe")
    with pytest.raises(ValueError, match="expected one dimension, such as mesh"):
        hf.shard_experts(model, mesh_of(1, count), num_max_tokens_per_rank=TOKENS)
    with pytest.raises(ValueError, match="is not sharded: expected shard_experts"):
        hf.apply_fsdp(model, mesh_of(1, count))
    hf.shard_experts(model, dist.group.WORLD, num_max_tokens_per_rank=TOKENS)
    with pytest.raises(ValueError, match="are DTensors already"):
        hf.shard_experts(model, dist.group.WORLD, num_max_tokens_per_rank=TOKENS)
    with pytest.raises(ValueError, match="expected these settings as arguments of shard_experts"):
        hf.configure(model, save="preact")
    with pytest.raises(ValueError, match=f"T = {2 * TOKENS} tokens, expected at most num_max_tokens_per_rank = {TOKENS}"):
        model(input_ids=batch(0, rows=4))
    mesh = mesh_of(1, count)
    for _ in range(2):  # a second model over the same mesh
        other = make_model("mega_moe")
        hf.shard_experts(other, mesh["ep"], num_max_tokens_per_rank=TOKENS)
        hf.apply_fsdp(other, mesh)
    copied = copy.deepcopy(model)  # averaged and reference models
    ids = batch(dist.get_rank())
    torch.testing.assert_close(copied(input_ids=ids).logits, model(input_ids=ids).logits)
    fsdp = sharded(2, count // 2)
    with pytest.raises(ValueError, match="is inside an FSDP unit"):
        hf.enable_main_grads(fsdp)
    model = make_model("mega_moe")
    mesh = mesh_of(2, count // 2)
    hf.shard_experts(model, mesh["ep"], num_max_tokens_per_rank=TOKENS)
    hf.enable_main_grads(model)
    with pytest.raises(ValueError, match="expected 1 with main gradients"):
        hf.apply_fsdp(model, mesh)


def named(name: str, function, *args, **options):
    made = functools.partial(function, *args, **options)
    made.__name__ = name
    return made


# Combinations are thinned: each option meets two layouts at most.
TWO = [
    expert_gradients_are_sums_without_fsdp,
    ranks_may_have_different_tokens_and_none_of_some_experts,
    transformers_own_expert_parallelism_computes_with_it,
    named("ep2", check, 1, 2),
    named("fsdp2_of_ep1", check, 2, 1),
    plain_fsdp_needs_no_set_up,
    mixed_precision_errs_no_more_than_the_eager_bf16_model,
    named("ep2_full_checkpointing", check, 1, 2, prepare=full_checkpointing),
    named("ep2_frozen_experts", check, 1, 2, prepare=freeze(".experts."), reference=freeze(".experts.")),
    named("ep2_frozen_router", check, 1, 2, prepare=freeze(".gate."), reference=freeze(".gate.")),
    named("ep2_compiled", check, 1, 2, after=compiled_layer),
    main_gradients_accumulate_in_fp32,
    main_gradients_of_bf16_parameters_do_not_round,
    clipping_uses_one_norm,
    full_state_dict_both_ways,
    fifty_steps_follow_the_eager_model,
    models_on_meta_are_sharded_before_they_have_memory,
    the_example_resumes_at_another_ep_size,
    misuse_is_named,
]
FOUR = [
    expert_gradients_are_sums_without_fsdp,
    named("ep4", check, 1, 4),
    named("fsdp2_ep2", check, 2, 2),
    named("fsdp2_ep2_selective_checkpointing", check, 2, 2, prepare=selective_checkpointing),
    named("fsdp2_ep2_frozen_gate_up", check, 2, 2, prepare=freeze("gate_up_proj"), reference=freeze("gate_up_proj")),
    named("fsdp4_ep1_full_checkpointing", check, 4, 1, prepare=full_checkpointing),
    accumulation_with_fsdp,
    clipping_uses_one_norm,
    mixed_precision_errs_no_more_than_the_eager_bf16_model,
    rows_are_sharded_where_experts_do_not_divide,
    training_resumes_at_another_ep_size,
]
SCENARIOS = {2: TWO, 4: FOUR}


def rank_main(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    reports = {}
    for scenario in SCENARIOS[size]:
        began = time.monotonic()
        try:
            scenario(*([folder] if "folder" in inspect.signature(scenario).parameters else []))
            reports[scenario.__name__] = ""
        except BaseException:  # noqa: BLE001 - reported by the test of this scenario
            reports[scenario.__name__] = traceback.format_exc()
        print(f"{scenario.__name__} {time.monotonic() - began:.1f} s", flush=True)  # shown when a test fails, and by -s
    torch.save(reports, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_processes(size, tmp_path):
    """One test for all scenarios of a size: processes are started once, whatever worker runs the test."""
    mp.spawn(rank_main, (size, str(tmp_path)), nprocs=size)
    reports = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    assert all(report.keys() == {scenario.__name__ for scenario in SCENARIOS[size]} for report in reports)
    failures = [f"{name}, rank {rank}:\n{text}" for rank, report in enumerate(reports) for name, text in report.items() if text]
    assert not failures, "\n".join(failures)
