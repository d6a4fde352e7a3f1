"""prime-rl's adapter over gloo processes, R = 2 and 4, against the plain formula: values, and gradients of input, router, experts and shared
expert; every weight layout; uneven tokens and a rank with none; frozen parts; activation checkpointing; micro-batches; FSDP2; compile.

One set of processes runs every scenario; each reports on its own. Inputs, weights and losses are the same on every rank, which checks its share.
"""

from __future__ import annotations

import copy
import os
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from prime_rl_contract import (
    LAYOUTS,
    ClampedSwiglu,
    E,
    GroupedExperts,
    H,
    I,
    K,
    MoE,
    OldMoE,
    ParallelDims,
    eager_layer,
    eager_moe,
    fill,
    model_config,
    shard_experts,
    split_weights,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import deep_gemm
from deep_gemm.integrations import prime_rl
from deep_gemm.integrations._buffers import release_buffers
from deep_gemm.testing import assert_close

BOUND = 16
TOKENS = (13, 0, 5, 16)  # of rank 0, 1, ...: uneven, one rank has none


class World:
    """This process, its device and dtype, an ep x dp mesh, and inputs of all ranks."""

    def __init__(self, rank: int, size: int, device_type: str, dtype: torch.dtype):
        self.rank, self.size, self.dtype = rank, size, dtype
        self.device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
        self.mesh = init_device_mesh(device_type, (size // 2, 2), mesh_dim_names=("dp_shard_mod_ep", "ep"))
        self.flat = init_device_mesh(device_type, (size,), mesh_dim_names=("ep",))

    def wide(self) -> ParallelDims:
        return ParallelDims(self.flat, self.size)  # all ranks are one expert-parallel group

    def inputs(self, *, seed=0, dtype=None, tokens=TOKENS) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(x [1, T, H], dy) of every rank; dy is the gradient of the loss, so that no two tokens count alike."""
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(2, 1, tokens[rank], H, generator=generator) for rank in range(self.size)]
        return [tuple(pair.to(self.device, dtype or self.dtype)) for pair in drawn]

    def expected(self, moe, batches, layer=eager_layer) -> dict[str, torch.Tensor]:
        """y and dx of this rank, gradients of all ranks' tokens for the parameters."""
        moe = copy.deepcopy(moe)
        out = {}
        for batch in batches:
            for rank, (x, dy) in enumerate(batch):
                x = x.clone().requires_grad_()
                y = layer(moe, x)
                y.backward(dy)
                if rank == self.rank:
                    out |= {"y": y.detach(), "dx": x.grad}
        return out | {name: parameter.grad for name, parameter in moe.named_parameters() if parameter.grad is not None}

    def actual(self, moe, batches, forward=None) -> dict[str, torch.Tensor]:
        for batch in batches:
            x, dy = batch[self.rank]
            x = x.clone().requires_grad_()
            y = (forward or moe)(x)
            y.backward(dy)
        return {"y": y.detach(), "dx": x.grad} | {
            name: parameter.grad for name, parameter in moe.named_parameters() if parameter.grad is not None
        }

    def check(self, actual, expected, bounds=None) -> None:
        assert actual.keys() == expected.keys(), (sorted(actual), sorted(expected))
        bounds = bounds or dict.fromkeys(actual, 1e-5 if self.dtype == torch.float32 else 0.02)
        for name, value in actual.items():
            assert_close(self.whole(name, value).double(), expected[name].double(), rel_frobenius=bounds[name], name=name)

    def whole(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient that all ranks' tokens make: a trainer sums those of replicated parameters (router, shared expert)."""
        if isinstance(gradient, DTensor):
            return gradient.full_tensor()
        if name not in ("y", "dx"):
            gradient = gradient.clone()
            dist.all_reduce(gradient)
        return gradient


def make_layer(world, layout="packed", *, activation=None, kind=MoE, dtype=None, before=None, config=None, **options):
    """(layer with all experts for the plain formula, the same with its share of experts and the dispatcher)."""
    experts = GroupedExperts(layout, **({} if activation is None else {"activation": activation}))
    plain = fill(kind(experts, **options), dtype=dtype or world.dtype).to(world.device)
    moe, dims = copy.deepcopy(plain), world.wide()
    if before is not None:
        before(plain)
        before(moe)
    shard_experts(moe.experts, dims.get_mesh("ep"))
    prime_rl.configure_mega_moe(moe, config or model_config(ep=dims.ep, seq_len=BOUND), dims)
    return plain, moe


def every_layout(world):
    for layout in LAYOUTS:
        for activation in (None, ClampedSwiglu(0.4)):
            plain, moe = make_layer(world, layout, activation=activation, shared=True)
            batch = world.inputs()
            world.check(world.actual(moe, [batch]), world.expected(plain, [batch]))
            assert moe.state_dict().keys() == plain.state_dict().keys()


def bf16_is_as_exact_as_eager_bf16(world):
    """Against FP64 of the same rounded weights: at most 1.1x the error of the eager layer in BF16, and at most 1 %."""
    plain, moe = make_layer(world, "separate", dtype=torch.bfloat16)
    for router in (plain.router, moe.router):
        router.float()
    batch = world.inputs(dtype=torch.bfloat16)
    ids = [plain.router(x.view(-1, H).float())[1] for x, _ in batch]  # of all three: a rounded score must not choose another expert

    def layer(moe, x, rank):
        rows = x.view(-1, H)
        scores = moe.router(rows, ids[rank])[0].to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        return eager_moe(rows, ids[rank], scores, *split_weights(moe.experts)).view(x.shape)

    def run(moe, batch):
        ranks = iter(range(world.size))
        return world.expected(moe, [batch], layer=lambda moe, x: layer(moe, x, next(ranks)))

    exact = run(copy.deepcopy(plain).double(), [tuple(part.double() for part in pair) for pair in batch])
    eager = run(plain, batch)
    bounds = {}
    for name, value in exact.items():
        error = (eager[name].double() - value).norm() / value.norm().clamp(min=1e-30)
        bounds[name] = min(0.01, 1.1 * float(error) + 1e-4)
    world.check(world.actual(moe, [batch], forward=lambda x: moe(x, ids[world.rank])), exact, bounds)


def plain_tensors_of_this_rank_need_no_mesh(world):
    plain = fill(MoE(GroupedExperts("w123")), dtype=world.dtype).to(world.device)
    moe = copy.deepcopy(plain)
    local = E // world.size
    for name, parameter in list(moe.experts.named_parameters()):
        setattr(moe.experts, name, torch.nn.Parameter(parameter.detach()[world.rank * local : (world.rank + 1) * local].clone()))
    prime_rl.attach(moe, prime_rl.MegaMoETokenDispatcher(E, K, H, I, dist.group.WORLD, BOUND, device=world.device))
    batch = world.inputs()
    expected = world.expected(plain, [batch])
    actual = world.actual(moe, [batch])
    for name in ("w1", "w2", "w3"):
        full = torch.cat([torch.empty_like(actual[f"experts.{name}"]) for _ in range(world.size)])
        dist.all_gather_into_tensor(full, actual[f"experts.{name}"])
        actual[f"experts.{name}"] = DTensor.from_local(full, world.flat, [Replicate()])
    world.check(actual, expected)


def the_layer_up_to_0_8_uses_its_fused_kernel_seam(world):
    plain, moe = make_layer(world, "w123", kind=OldMoE)
    batch = world.inputs()
    world.check(world.actual(moe, [batch]), world.expected(plain, [batch]))


def routing_of_all_kinds(world):
    """All to one rank, one expert for all, -1, a token without any expert, scores of zero, ids in 16 bits; a dispatcher called without a layer."""
    experts = fill(GroupedExperts("packed"), dtype=torch.float64)
    mine = copy.deepcopy(experts)
    shard_experts(mine, world.flat)
    dispatcher = prime_rl.MegaMoETokenDispatcher(E, K, H, I, dist.group.WORLD, BOUND, device="cpu")
    tokens, generator = 9, torch.Generator().manual_seed(3)
    uniform = torch.rand(world.size, tokens, E, generator=generator).topk(K).indices
    holes = uniform.masked_fill(torch.rand(uniform.shape, generator=generator) < 0.4, -1)
    holes[:, 4] = -1
    one_rank = uniform % (E // world.size)
    for ids in (
        uniform,
        holes,
        one_rank,
        torch.full_like(uniform, 5),
        uniform.to(torch.int16),
        uniform.int(),
        torch.full_like(uniform, -1),
    ):
        scores = torch.rand(ids.shape, generator=generator, dtype=torch.float64)
        scores[:, 2] = 0.0
        leaves = [tensor.clone().requires_grad_() for tensor in (torch.randn(world.size, tokens, H, generator=generator).double(), scores)]
        ours = [tensor[world.rank].detach().clone().requires_grad_() for tensor in leaves]
        for module in (experts, mine):
            module.zero_grad(set_to_none=True)
        weights = split_weights(experts)
        y = torch.stack([eager_moe(leaves[0][rank], ids[rank], leaves[1][rank], *weights) for rank in range(world.size)])
        y.square().sum().backward()
        actual = dispatcher.run(ours[0], ours[1], ids[world.rank], mine, score_before_experts=False)
        actual.square().sum().backward()
        dispatcher.synchronize()
        torch.testing.assert_close(actual.detach(), y[world.rank].detach())
        for leaf, own in zip(leaves, ours, strict=True):
            torch.testing.assert_close(own.grad, leaf.grad[world.rank])
        for (name, parameter), own in zip(experts.named_parameters(), mine.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


def frozen_parts_get_no_gradient(world):
    for frozen in ("experts", "router", "down_proj"):

        def freeze(moe, frozen=frozen):
            for name, parameter in moe.named_parameters():
                parameter.requires_grad_(frozen not in name)

        plain, moe = make_layer(world, before=freeze)
        batch = world.inputs()
        actual = world.actual(moe, [batch])
        assert not any(frozen in name for name in actual)
        world.check(actual, world.expected(plain, [batch]))
    _, moe = make_layer(world, before=lambda moe: moe.requires_grad_(False))
    x, _ = world.inputs()[world.rank]
    assert not moe(x).requires_grad  # nothing to train: no graph


def activation_checkpointing_gives_the_same_bits(world):
    batch = world.inputs()

    def recompute(function, *args, **kwargs):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def full(moe):
        return lambda x: recompute(moe, x)

    def selective(moe):  # prime-rl patches methods of the instance
        forward = moe.experts.forward
        moe.experts.forward = lambda *args: recompute(forward, *args)
        return moe

    def dispatcher_only(moe):
        run = moe.token_dispatcher.run
        moe.token_dispatcher.run = lambda *args, **kwargs: recompute(run, *args, **kwargs)
        return moe

    for save in ("recompute", "preact"):
        config = model_config(ep=world.size, seq_len=BOUND, save=save)
        results = []
        for wrap in (lambda moe: moe, full, selective, dispatcher_only):
            _, moe = make_layer(world, config=config)
            results.append(world.actual(moe, [batch], forward=wrap(moe)))
        for other in results[1:]:
            assert other.keys() == results[0].keys()
            for name, value in other.items():
                first = results[0][name]
                pair = (value.to_local(), first.to_local()) if isinstance(value, DTensor) else (value, first)
                assert torch.equal(*pair), (save, name)


def micro_batches_accumulate(world):
    plain, moe = make_layer(world, shared=True)
    batches = [world.inputs(seed=seed, tokens=TOKENS[seed:] + TOKENS[:seed]) for seed in range(3)]
    world.check(world.actual(moe, batches), world.expected(plain, batches))


def two_layers_share_one_buffer(world):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(MoE(GroupedExperts()) for _ in range(2))

        def forward(self, x, layer=None):
            for moe in self.layers:
                x = x + (moe(x) if layer is None else layer(moe, x))
            return x

    plain = fill(Model(), dtype=world.dtype).to(world.device)
    model = copy.deepcopy(plain)
    made = prime_rl.configure_mega_moe(model, model_config(ep=world.size, seq_len=BOUND), world.wide())
    for moe in model.layers:  # prime-rl shards them after the dispatchers are made
        shard_experts(moe.experts, world.flat)
    assert len(made) == 2 and made[0].buffer is made[1].buffer
    batch = world.inputs()
    expected = world.expected(plain, [batch], layer=lambda model, x: model(x, eager_layer))
    world.check(world.actual(model, [batch]), expected)
    again = copy.deepcopy(model)  # averaged or reference models: weights of their own, the buffer shared
    assert again.layers[0].token_dispatcher.buffer is made[0].buffer
    with torch.no_grad():
        again.layers[0].experts.down_proj.zero_()
    again.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    world.check(world.actual(model, [batch]), expected)
    assert not torch.equal(again(batch[0][0]), model(batch[0][0]))


def too_many_tokens_and_bad_calls_are_refused_before_any_exchange(world):
    _, moe = make_layer(world)
    empty = {"dtype": world.dtype, "device": world.device}
    with pytest.raises(ValueError, match=r"17 tokens, but model\.moe\.dispatch\.max_tokens_per_rank is 16; raise it"):
        moe(torch.zeros(1, BOUND + 1, H, **empty))
    moe.score_before_experts = True
    with pytest.raises(ValueError, match="score_before_experts = True"):
        moe(torch.zeros(1, 3, H, **empty))
    with pytest.raises(TypeError, match="expected an MoE layer of prime-rl"):
        prime_rl.attach(torch.nn.ModuleDict({"experts": GroupedExperts()}), moe.token_dispatcher)


def a_model_on_the_meta_device_gets_its_buffer_on_the_mesh(world):
    """prime-rl makes dispatchers before the model has memory; weights come afterwards, into the same modules."""
    plain = fill(MoE(GroupedExperts("separate")), dtype=world.dtype).to(world.device)
    with torch.device("meta"):
        moe = MoE(GroupedExperts("separate")).to(world.dtype)
    (dispatcher,) = prime_rl.configure_mega_moe(moe, model_config(ep=world.size, seq_len=BOUND), world.wide())
    assert dispatcher.buffer.device == world.device
    moe.to_empty(device=world.device).load_state_dict(plain.state_dict())
    shard_experts(moe.experts, world.flat)
    batch = world.inputs()
    world.check(world.actual(moe, [batch]), world.expected(plain, [batch]))


def another_dispatcher_finds_the_experts_unchanged(world):
    _, moe = make_layer(world)
    rows = torch.ones(2, H, device=world.device)
    assert torch.equal(moe.experts(rows, 3.0), 3 * rows)


def num_sms_is_set(world):
    from deep_gemm import gemm_launch

    make_layer(world, config=model_config(ep=world.size, seq_len=BOUND, num_sms=100))
    assert gemm_launch._num_sms == 100
    deep_gemm.set_num_sms(0)


def fsdp2_around_experts_and_layer(world):
    """Experts sharded over ep and over the rest, FSDP in BF16 with FP32 reduction, a fixed divide factor, two micro-batches. The scores must
    reach the experts in FP32: rounded to BF16 they would move the result by more than the bound against a run without FSDP."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    plain = fill(MoE(GroupedExperts("packed"))).to(world.device)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(parameter.bfloat16())
    moe, dims = copy.deepcopy(plain), ParallelDims(world.mesh, 2)
    shard_experts(moe.experts, world.mesh["ep"])
    (dispatcher,) = prime_rl.configure_mega_moe(moe, model_config(ep=2, seq_len=BOUND), dims)
    seen = []
    run_experts = dispatcher._run_experts
    dispatcher._run_experts = lambda experts, x, scores, ids: seen.append((x.dtype, scores.dtype)) or run_experts(experts, x, scores, ids)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(moe.experts, mesh=world.mesh["dp_shard_mod_ep"], mp_policy=policy)
    moe.experts.set_gradient_divide_factor(world.size)
    if (
        world.mesh["dp_shard_mod_ep"].size() > 1 and world.device.type == "cpu"
    ):  # gloo cannot multiply within a reduction; alone, torch 2.13 would then divide twice
        moe.experts.set_force_sum_reduction_for_comms(True)
    fully_shard(moe.router, mesh=world.flat, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32))
    fully_shard(moe, mesh=world.flat, mp_policy=policy)
    batches = [world.inputs(seed=seed, dtype=torch.bfloat16) for seed in range(2)]
    actual = world.actual(moe, batches)
    assert seen == [(torch.bfloat16, torch.float32)] * 2
    expected = world.expected(plain, [[tuple(part.float() for part in pair) for pair in batch] for batch in batches])
    for name, value in actual.items():
        if name in ("y", "dx"):
            assert_close(value.float(), expected[name], rel_frobenius=0.01, name=name)
        else:  # the mean over ranks, as trainers that divide by the number of data-parallel ranks want it
            assert_close(value.full_tensor() * world.size, expected[name], rel_frobenius=0.01, name=name)


def compiles_in_one_graph(world):
    for wrap in (False, True):
        plain, moe = make_layer(world, shared=True)
        moe.compile(fullgraph=True, backend="aot_eager")
        batch = world.inputs()
        forward = (lambda x, moe=moe: checkpoint(moe, x, use_reentrant=False)) if wrap else None
        world.check(world.actual(moe, [batch], forward=forward), world.expected(plain, [batch]))
    torch.compiler.reset()


SCENARIOS = (
    every_layout,
    bf16_is_as_exact_as_eager_bf16,
    plain_tensors_of_this_rank_need_no_mesh,
    the_layer_up_to_0_8_uses_its_fused_kernel_seam,
    routing_of_all_kinds,
    frozen_parts_get_no_gradient,
    activation_checkpointing_gives_the_same_bits,
    micro_batches_accumulate,
    two_layers_share_one_buffer,
    too_many_tokens_and_bad_calls_are_refused_before_any_exchange,
    a_model_on_the_meta_device_gets_its_buffer_on_the_mesh,
    another_dispatcher_finds_the_experts_unchanged,
    num_sms_is_set,
    fsdp2_around_experts_and_layer,
    compiles_in_one_graph,
)


CPU_ONLY = (routing_of_all_kinds,)  # FP64


def rank_main(rank: int, size: int, device_type: str, dtype: torch.dtype, folder: str) -> None:
    torch.set_num_threads(1)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    world, reports = World(rank, size, device_type, dtype), {}
    for scenario in SCENARIOS:
        try:
            if device_type == "cpu" or scenario not in CPU_ONLY:
                scenario(world)
            reports[scenario.__name__] = ""
        except BaseException:  # noqa: BLE001 - reported by the test of this scenario
            reports[scenario.__name__] = traceback.format_exc()
        dist.barrier()
        release_buffers()
    torch.save(reports, f"{folder}/{rank}.pt")
    os._exit(0)  # a scenario that failed on one rank leaves the group in no state to be taken down


RUNS = [
    pytest.param(2, "cpu", torch.float32, id="R2"),
    pytest.param(4, "cpu", torch.float32, id="R4"),
    # What the GPUs run, so that the scenarios and their bounds are known to hold in BF16.
    pytest.param(2, "cpu", torch.bfloat16, id="R2-bf16"),
    pytest.param(2, "cuda", torch.bfloat16, id="R2-gpu", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("size", "device_type", "dtype"), RUNS)
def test_ranks(tmp_path, size, device_type, dtype):
    """One item for all scenarios of a world: several would start its processes again in every worker of pytest-xdist."""
    if device_type == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    mp.spawn(rank_main, (size, device_type, dtype, str(tmp_path)), nprocs=size)
    reports = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    assert [list(report) for report in reports] == [[scenario.__name__ for scenario in SCENARIOS]] * size
    failures = [f"{name}, rank {rank}:\n{text}" for rank, report in enumerate(reports) for name, text in report.items() if text]
    assert not failures, "\n".join(failures)
