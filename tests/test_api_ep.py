"""The API over two gloo processes: values and gradients of expert parallelism, settings that differ, a fault on one rank, checkpointing,
a sub-group, and FSDP2 around nn.MegaMoE. One pair of processes runs every scenario; each reports on its own."""

from __future__ import annotations

import os
import traceback
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from api_inputs import E, H, I, Inputs, K, make_buffer, make_inputs, plain_moe
from torch.utils.checkpoint import checkpoint

import deep_gemm
from deep_gemm.nn import MegaMoE

RANKS = 2
TOKENS = (13, 4)


def share(rank: int, **options) -> tuple[Inputs, Inputs, slice, slice]:
    """All tokens and experts, this rank's part of them, and where it lies."""
    whole = make_inputs(tokens=sum(TOKENS), **options)
    begin = sum(TOKENS[:rank])
    tokens, experts = slice(begin, begin + TOKENS[rank]), slice(rank * E // RANKS, (rank + 1) * E // RANKS)
    mine = Inputs(whole.x[tokens], whole.topk_idx[tokens], whole.topk_weights[tokens], whole.w13[experts], whole.w2[experts])
    return whole, mine, tokens, experts


def expected_gradients(whole: Inputs) -> tuple[torch.Tensor, dict]:
    leaves = whole.trainable()
    y = plain_moe(leaves)
    y.square().sum().backward()
    return y.detach(), leaves.gradients()


def gradients_match_one_rank(rank):
    for save in ("recompute", "preact"):
        whole, mine, tokens, experts = share(rank)
        y, expected = expected_gradients(whole)
        leaves = mine.trainable()
        actual = deep_gemm.mega_moe(*leaves.args, make_buffer(group=dist.group.WORLD), save=save)
        actual.square().sum().backward()
        torch.testing.assert_close(actual.detach(), y[tokens])
        for name, value in leaves.gradients().items():
            torch.testing.assert_close(value, expected[name][tokens if name in ("x", "topk_weights") else experts])


def checkpointed_layers_share_a_buffer(rank):
    _, mine, _, _ = share(rank, holes=False)
    buffer = make_buffer(group=dist.group.WORLD)

    def two_layers(leaves, wrap):
        x = leaves.x
        for scale in (1.0, 0.5):
            x = x + wrap(lambda x, scale=scale: deep_gemm.mega_moe(x * scale, *leaves.args[1:], buffer), x)
        x.square().sum().backward()
        return leaves.gradients()

    plain = two_layers(mine.trainable(), lambda layer, x: layer(x))
    again = two_layers(mine.trainable(), lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    assert all(torch.equal(again[name], value) for name, value in plain.items())


def settings_that_differ_are_named_on_every_rank(rank):
    for name, values in (("num_topk", (2, 3)), ("capacity_factor", (1.25, 1.5)), ("precision", ("bf16", "fp8")), ("hidden", (10, 20))):
        settings = {"num_experts": E, "num_max_tokens_per_rank": 16, "num_topk": K, "hidden": H, "intermediate_hidden": I, name: values[rank]}
        with pytest.raises(ValueError, match=f"{name} differs between the ranks .*rank 0 has {values[0]!r}, rank 1 has {values[1]!r}"):
            deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, **settings, device="cpu")


def a_fault_of_one_rank_reaches_the_other(rank):
    device = "cpu" if rank == 0 else "cuda"  # rank 1 has no GPU, or H that is no multiple of 128
    with pytest.raises((ValueError, deep_gemm.BackendUnavailable), match="backend differs|could not make its buffer|unavailable|multiple of 128"):
        deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, E, 16, K, H, I, device=device)
    with pytest.raises(ValueError, match="num_experts = 5: expected a multiple of the number of ranks, 2"):
        deep_gemm.get_symm_buffer_for_mega_moe(dist.group.WORLD, 5, 16, K, H, I, device="cpu")
    gradients_match_one_rank(rank)  # the next good call works


def a_bad_argument_on_every_rank_raises_before_any_exchange(rank):
    _, mine, _, _ = share(rank)
    buffer = make_buffer(group=dist.group.WORLD, tokens=13)
    mine.topk_idx[1, 1] = E + rank
    with pytest.raises(ValueError, match=rf"topk_idx\[1, 1\] = {E + rank}, but num_experts = 6"):
        deep_gemm.mega_moe(*mine.args, buffer)
    whole, mine, tokens, _ = share(rank)
    torch.testing.assert_close(deep_gemm.mega_moe(*mine.args, buffer), plain_moe(whole)[tokens])


def a_late_peer_ends_in_an_error(rank):
    """A rank-local fault leaves the peer waiting only as long as torch.distributed does."""
    group = dist.new_group([0, 1], backend="gloo", timeout=timedelta(seconds=2))
    _, mine, _, _ = share(rank)
    buffer = make_buffer(group=group)
    if rank == 1:
        with pytest.raises(TypeError, match="x.dtype = torch.float16"):
            deep_gemm.mega_moe(mine.x.half(), *mine.args[1:], buffer)
    else:
        with pytest.raises(RuntimeError, match="(?i)timed out|timeout"):
            deep_gemm.mega_moe(*mine.args, buffer)
    dist.barrier()  # of the other group: rank 1 is there while rank 0 waits


def groups_of_one_are_independent(rank):
    own = [dist.new_group([r], backend="gloo") for r in range(RANKS)]
    inputs = make_inputs(seed=rank, tokens=3 + rank)
    buffer = make_buffer(group=own[rank])
    assert buffer.num_ranks == 1 and buffer.rank == 0
    torch.testing.assert_close(deep_gemm.mega_moe(*inputs.args, buffer), plain_moe(inputs))
    with pytest.raises((ValueError, TypeError), match="group = "):
        make_buffer(group=own[1 - rank])


def no_symmetric_memory_is_one_clear_sentence(rank):
    from deep_gemm.mega.groups import ProcessGroupAdapter

    with pytest.raises(deep_gemm.BackendUnavailable, match="no symmetric memory on cpu"):
        ProcessGroupAdapter(dist.group.WORLD).symmetric_empty(64, torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(deep_gemm.BackendUnavailable, match="no symmetric memory between the 2 ranks of group .* on cuda:0: torch says: "):
            ProcessGroupAdapter(dist.group.WORLD).symmetric_empty(64, torch.device("cuda", 0))
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


def fsdp2_shards_the_experts(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    module = MegaMoE(H, I, E, K, num_max_tokens_per_rank=32, dtype=torch.float32, device="cpu")
    whole = [make_inputs(dtype=torch.bfloat16, seed=seed, tokens=9) for seed in range(RANKS)]
    weights = {name: parameter.detach().bfloat16() for name, parameter in module.named_parameters()}
    expected = {name: 0 for name in weights}
    for inputs in whole:
        inputs.w13, inputs.w2 = weights["w13"], weights["w2"]
        leaves = inputs.trainable()
        deep_gemm.mega_moe(*leaves.args, module.buffer).float().square().sum().backward()
        expected = {name: total + leaves.gradients()[name].float() / RANKS for name, total in expected.items()}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
    mine = whole[rank]
    module(mine.x, mine.topk_idx, mine.topk_weights).float().square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad.to_local().shape[0] == E // RANKS
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name])


def a_backend_that_one_rank_cannot_make_ends_all(rank):
    """Settings agree, then rank 1 runs out of memory: rank 0 learns of it at once, and not from a late peer at its first call."""
    from unittest import mock

    from deep_gemm.reference.backend import ReferenceBackend

    def init(self, buffer):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with mock.patch.object(ReferenceBackend, "__init__", init) if rank == 1 else nullcontext():
        expected = (torch.OutOfMemoryError, "^CUDA out of") if rank == 1 else (ValueError, "rank 1 .* could not make its buffer: OutOfMemoryError: CUDA")
        with pytest.raises(expected[0], match=expected[1]):
            make_buffer(group=dist.group.WORLD)
    make_buffer(group=dist.group.WORLD)


SCENARIOS = (
    gradients_match_one_rank,
    checkpointed_layers_share_a_buffer,
    settings_that_differ_are_named_on_every_rank,
    a_fault_of_one_rank_reaches_the_other,
    a_backend_that_one_rank_cannot_make_ends_all,
    a_bad_argument_on_every_rank_raises_before_any_exchange,
    groups_of_one_are_independent,
    no_symmetric_memory_is_one_clear_sentence,
    fsdp2_shards_the_experts,
    a_late_peer_ends_in_an_error,  # last: its group is of no use afterwards
)


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    reports = {}
    for scenario in SCENARIOS:
        try:
            scenario(rank)
            reports[scenario.__name__] = ""
        except BaseException:  # noqa: BLE001 - reported by the test of this scenario
            reports[scenario.__name__] = traceback.format_exc()
    torch.save(reports, f"{folder}/{rank}.pt")
    os._exit(0)  # gloo aborts when it is taken down after the time-out above


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api_ep")
    mp.spawn(rank_main, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("scenario", [scenario.__name__ for scenario in SCENARIOS])
def test_two_processes(reports, scenario):
    failures = [f"rank {rank}:\n{report[scenario]}" for rank, report in enumerate(reports) if report[scenario]]
    assert not failures, "\n".join(failures)
