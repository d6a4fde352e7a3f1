"""The buffers that integrations share: found again, replaced by larger ones only, kept apart by group, shape and options, released."""

from __future__ import annotations

import pytest
import torch

from deep_gemm.integrations import _buffers
from deep_gemm.integrations._buffers import find_buffer, release_buffers, shared_buffer

SHAPE = (4, 8, 2, 16, 8)  # E, T, K, H, I


@pytest.fixture(autouse=True)
def released():
    yield
    release_buffers()


def test_layers_of_one_shape_get_one_buffer():
    assert find_buffer(None, *SHAPE, device="cpu") is None
    first = shared_buffer(None, *SHAPE, device="cpu")
    assert shared_buffer(None, *SHAPE, device=torch.device("cpu")) is first
    assert find_buffer(None, *SHAPE, device="cpu") is first


def test_a_smaller_bound_is_served_and_a_larger_one_replaces():
    first = shared_buffer(None, *SHAPE, device="cpu")
    assert shared_buffer(None, 4, 3, 2, 16, 8, device="cpu") is first
    assert find_buffer(None, 4, 9, 2, 16, 8, device="cpu") is None
    larger = shared_buffer(None, 4, 9, 2, 16, 8, device="cpu")
    assert larger is not first and larger.num_max_tokens_per_rank == 9
    assert find_buffer(None, *SHAPE, device="cpu") is larger
    assert first.backend("reference") is not None  # who holds the smaller one can go on


@pytest.mark.parametrize("other", [{"precision": "fp8"}, {"capacity_factor": 2.0}, {"backend": "reference"}])
def test_other_options_get_another_buffer(other):
    assert shared_buffer(None, *SHAPE, device="cpu") is not shared_buffer(None, *SHAPE, device="cpu", **other)


def test_release_destroys_and_forgets():
    buffer = shared_buffer(None, *SHAPE, device="cpu")
    release_buffers()
    assert not _buffers._buffers and find_buffer(None, *SHAPE, device="cpu") is None
    with pytest.raises(RuntimeError, match="destroyed"):
        buffer.backend("reference")


def test_a_setting_at_fault_is_named_and_nothing_is_kept():
    with pytest.raises(ValueError, match="num_topk = 5: expected 1..4"):
        shared_buffer(None, 4, 8, 5, 16, 8, device="cpu")
    assert not _buffers._buffers
