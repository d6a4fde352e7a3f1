"""VirtualGroup without a GPU: its ranks are groups in the sense of mega/groups.py, share memory by address, and refuse what does not agree."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from deep_gemm.errors import BackendUnavailable
from deep_gemm.mega.buffer import MegaMoeBuffer
from deep_gemm.mega.groups import resolve_group
from deep_gemm.testing import VirtualGroup, virtual


def test_ranks_are_groups():
    group = VirtualGroup(4, "cpu")
    for rank in range(4):
        resolved = resolve_group(group.rank(rank))
        assert resolved is group.rank(rank)
        assert (resolved.rank, resolved.size, resolved.name) == (rank, 4, "virtual4")


def test_symmetric_memory_is_zero_and_addressable_by_every_rank():
    group = VirtualGroup(3, "cpu")
    slabs, addresses = zip(*(group.rank(rank).symmetric_empty(256, torch.device("cpu")) for rank in range(3)))
    assert all(a == addresses[0] for a in addresses)
    assert list(addresses[0]) == [slab.data_ptr() for slab in slabs]
    assert not any(slab.any() for slab in slabs)
    ctypes.c_uint8.from_address(addresses[0][2]).value = 7  # rank 0 writes into rank 2's memory
    assert [int(slab[0]) for slab in slabs] == [0, 0, 7]


def test_second_allocation_of_each_rank_belongs_together():
    group = VirtualGroup(2, "cpu")
    first, second = group.rank(0), group.rank(1)
    a, a_addresses = first.symmetric_empty(64, torch.device("cpu"))
    b, b_addresses = first.symmetric_empty(128, torch.device("cpu"))
    c, c_addresses = second.symmetric_empty(64, torch.device("cpu"))
    d, d_addresses = second.symmetric_empty(128, torch.device("cpu"))
    assert a_addresses == c_addresses == [a.data_ptr(), c.data_ptr()]
    assert b_addresses == d_addresses == [b.data_ptr(), d.data_ptr()]


def test_different_sizes_and_devices_are_refused():
    group = VirtualGroup(2, "cpu")
    group.rank(0).symmetric_empty(64, torch.device("cpu"))
    with pytest.raises(ValueError, match="rank 1 asks for 128 bytes of symmetric memory, an earlier rank of the group for 64"):
        group.rank(1).symmetric_empty(128, torch.device("cpu"))
    with pytest.raises(ValueError, match="device = meta: expected cpu"):
        group.rank(0).symmetric_empty(64, torch.device("meta"))


def test_gather_shows_a_mismatch_to_the_later_rank():
    group = VirtualGroup(3, "cpu")
    assert group.rank(0).all_gather_object("a") == ["a", "a", "a"]
    assert group.rank(1).all_gather_object("b") == ["a", "b", "b"]
    assert group.rank(2).all_gather_object("a") == ["a", "b", "a"]
    assert group.rank(0).all_gather_object("c") == ["c", "c", "c"]  # the next gather begins anew


def test_buffers_with_different_settings_are_refused():
    group = VirtualGroup(2, "cpu")
    options = {
        "num_experts": 8,
        "num_max_tokens_per_rank": 4,
        "num_topk": 2,
        "intermediate_hidden": 32,
        "precision": "bf16",
        "capacity_factor": 1.1,
    }
    with pytest.raises(BackendUnavailable, match="VirtualRank"):  # settings agree so far; the CPU backend then wants torch.distributed
        MegaMoeBuffer(group.rank(0), device="cpu", backend="reference", hidden=32, **options)
    with pytest.raises(ValueError, match="hidden differs between the ranks of group 'virtual2': rank 0 has 32, rank 1 has 64"):
        MegaMoeBuffer(group.rank(1), device="cpu", backend="reference", hidden=64, **options)


def test_run_calls_every_chosen_rank_in_order():
    group = VirtualGroup(3, "cpu")
    assert group.run(lambda rank: rank * 10) == [0, 10, 20]
    assert group.run(lambda rank: rank, ranks=[2, 0]) == [2, 0]


@pytest.mark.parametrize("value", [0, 33, "2"])
def test_impossible_sizes_are_refused(value):
    with pytest.raises(ValueError, match="num_ranks = .*: expected 1..32"):
        VirtualGroup(value, "cpu")


def test_too_few_hardware_queues_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    virtual._claim_queues(8)
    with pytest.raises(RuntimeError, match="num_ranks = 16, but CUDA_DEVICE_MAX_CONNECTIONS = 8: .* set CUDA_DEVICE_MAX_CONNECTIONS=32"):
        virtual._claim_queues(16)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    virtual._claim_queues(16)


def test_queues_are_claimed_before_cuda_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    virtual._claim_queues(16)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_sms_are_shared_out():
    assert virtual._shares_of(132, 8, None) == [16] * 8
    assert virtual._shares_of(4, 8, None) == [1] * 8
    assert virtual._shares_of(132, 8, 5) == [5] * 8
    group = VirtualGroup(3, "cpu", num_sms_per_rank=(4, 1, 7))
    assert [group.rank(rank).num_sms for rank in range(3)] == [4, 1, 7]
    for wrong in (0, (1, 2), (1, 0, 2), "abc"):
        with pytest.raises(ValueError, match="num_sms_per_rank = .*: expected a positive number, 3 of them, or None"):
            virtual._shares_of(132, 3, wrong)
