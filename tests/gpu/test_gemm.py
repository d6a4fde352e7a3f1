"""BF16 GEMMs on the GPU against FP32: every name, operand order and output, tiles cut by every edge, groups of every size, rows that must not
be touched, more than 2^31 elements, equal bits on every run.

Bounds: gemm_support.py.
"""

from __future__ import annotations

import pytest
import torch
from gemm_support import NAN, aligned, contiguous_layout, normal

import deep_gemm
from deep_gemm.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float32]


def in_order(a: torch.Tensor, b: torch.Tensor, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """a [m, k], b [n, k] as the two letters of a GEMM's name want them."""
    return (a if order[0] == "n" else a.t().contiguous()), (b if order[1] == "t" else b.transpose(-1, -2).contiguous())


# ---- dense -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize(
    "m,n,k", [(128, 256, 64), (256, 512, 1024), (8, 8, 8), (136, 264, 72), (1000, 776, 2048), (2048, 768, 4096), (4096, 4096, 4096)]
)
def test_dense(check, m, n, k, order, dtype):
    a, b = normal(m, k, seed=1), normal(n, k, seed=2)
    d = torch.full((m, n), NAN, dtype=dtype, device="cuda")
    getattr(deep_gemm, f"bf16_gemm_{order}")(*in_order(a, b, order), d)
    check(d, a.float() @ b.float().t())


@pytest.mark.parametrize("m,n,k", [(1, 256, 64), (7, 1000, 128), (129, 257, 64), (300, 3, 520)])
def test_dense_with_any_m_and_n_in_nt(check, m, n, k):
    a, b = normal(m, k, seed=1), normal(n, k, seed=2)
    d = torch.full((m, n), NAN, dtype=torch.float32, device="cuda")
    deep_gemm.bf16_gemm_nt(a, b, d)
    check(d, a.float() @ b.float().t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("aliased", [False, True])
def test_dense_adds_c(check, dtype, aliased):
    m, n, k = 520, 392, 264
    a, b, c = normal(m, k, seed=1), normal(n, k, seed=2), normal(m, n, seed=3).to(dtype)
    truth = c.float() + a.float() @ b.float().t()
    d = c if aliased else torch.full_like(c, NAN)
    deep_gemm.bf16_gemm_nt(a, b, d, c)
    check(d, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [32, 64, 96, 192])
def test_tiles_that_end_on_either_staging_box_follow_each_other(check, n, dtype):
    """Columns that fill an odd number of 128-byte boxes, next tiles at once (k is one block), many per CTA."""
    a, b = normal(128 * 132 * 8, 64, seed=1), normal(n, 64, seed=2)
    d = torch.full((a.shape[0], n), NAN, dtype=dtype, device="cuda")
    deep_gemm.bf16_gemm_nt(a, b, d)
    check(d, a.float() @ b.float().t())


def test_dense_writes_into_a_view_and_nothing_beside_it(check):
    whole = torch.full((300, 512), 7.0, dtype=torch.bfloat16, device="cuda")
    a, b = normal(260, 128, seed=1), normal(248, 128, seed=2)
    view = whole[20:280, 128 : 128 + 248]
    deep_gemm.bf16_gemm_nt(a, b, view)
    check(view, a.float() @ b.float().t())
    view.fill_(7.0)
    assert (whole == 7.0).all()


@pytest.mark.parametrize("m,n,k", [(0, 128, 64), (128, 0, 64), (128, 128, 0)])
def test_dense_without_elements(m, n, k):
    d = torch.full((m, n), NAN, device="cuda")
    deep_gemm.bf16_gemm_nt(normal(m, k), normal(n, k), d)
    torch.cuda.synchronize()
    assert (d == 0).all()


def test_more_than_2_31_elements(check):
    m, n, k = 2**31 // 8192 + 256, 8192, 64
    a, b = normal(m, k, seed=1), normal(n, k, seed=2)
    d = torch.full((m, n), NAN, dtype=torch.bfloat16, device="cuda")
    deep_gemm.bf16_gemm_nt(a, b, d)
    assert d.numel() > 2**31
    for part in (slice(0, 512), slice(m // 2, m // 2 + 512), slice(m - 512, m)):
        check(d[part], a[part].float() @ b.float().t())
    assert not d.sum(1, dtype=torch.float32).isnan().any()


def test_operand_of_more_than_2_31_elements(check):
    m, n, k = 2**31 // 16384 + 128, 256, 16384
    a, b = torch.empty(m, k, dtype=torch.bfloat16, device="cuda"), normal(n, k, seed=2)
    for part in a.split(8192):
        part.normal_()
    d = torch.full((m, n), NAN, dtype=torch.float32, device="cuda")
    deep_gemm.bf16_gemm_nt(a, b, d)
    for part in (slice(0, 512), slice(m - 512, m)):
        check(d[part], a[part].float() @ b.float().t())


# ---- m-grouped ---------------------------------------------------------------------------------------------------------------------

GROUPS = {
    "even": [256] * 8,
    "ragged": [1, 127, 128, 129, 640, 3, 255, 77],
    "empty": [0, 300, 0, 0, 5, 0, 128, 0],
    "one-row": [1] * 16,
    "first-only": [700, 0, 0, 0],
    "last-only": [0, 0, 0, 700],
    "none": [0, 0, 0, 0],
}


def grouped_truth(a: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    truth = torch.zeros(a.shape[0], b.shape[1], device="cuda")
    for group in range(b.shape[0]):
        truth[index == group] = a[index == group].float() @ b[group].float().t()
    return truth


@pytest.mark.parametrize("psum", [False, True], ids=["index", "psum"])
@pytest.mark.parametrize("order", ["nt", "nn"])
@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("n,k", [(768, 2048), (264, 136)])
def test_m_grouped_contiguous(check, sizes, n, k, order, psum):
    index, ends, used = contiguous_layout(sizes)
    a, b = normal(len(index), k, seed=1), normal(len(sizes), n, k, seed=2)
    a[~used] = NAN
    d = torch.full((len(index), n), 7.0, dtype=torch.bfloat16, device="cuda")
    weight = b if order == "nt" else b.transpose(1, 2).contiguous()
    call = getattr(deep_gemm, f"m_grouped_bf16_gemm_{order}_contiguous")
    call(a, weight, d, ends if psum else index, use_psum_layout=psum)
    if used.any():
        check(d[used], grouped_truth(a, b, index)[used])
    assert (d[~used] == 7.0).all(), "a row without a group was written"


@pytest.mark.parametrize("n,k", [(1536, 2048), (2048, 768), (3072, 4096), (4096, 1536), (4096, 7168), (7168, 2048)])
def test_m_grouped_at_the_model_shapes_in_fp32(check, n, k):
    sizes = [0, 513, 128, 1, 1000, 384]
    index, ends, used = contiguous_layout(sizes)
    a, b = normal(len(index), k, seed=1), normal(len(sizes), n, k, seed=2)
    d = torch.full((len(index), n), 7.0, device="cuda")
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, ends, use_psum_layout=True)
    check(d[used], grouped_truth(a, b, index)[used])
    assert (d[~used] == 7.0).all()


@pytest.mark.parametrize("masked", [[64, 0, 1, 256], [0, 0, 0, 0], [256, 256, 256, 256], [3, 130, 129, 0]], ids=str)
def test_m_grouped_masked(check, masked):
    groups, rows, n, k = len(masked), 256, 768, 2048
    a, b = normal(groups, rows, k, seed=1), normal(groups, n, k, seed=2)
    used = torch.arange(rows, device="cuda") < torch.tensor(masked, device="cuda")[:, None]
    a[~used] = NAN
    d = torch.full((groups, rows, n), 7.0, dtype=torch.bfloat16, device="cuda")
    counts = torch.tensor(masked, dtype=torch.int32, device="cuda")
    deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, counts, expected_m=max(1, sum(masked) // groups))
    if used.any():
        check(d[used], torch.einsum("grk,gnk->grn", a.float(), b.float())[used])
    assert (d[~used] == 7.0).all(), "a row past its group's count was written"


# ---- k-grouped ---------------------------------------------------------------------------------------------------------------------

K_SIZES = {"mixed": [0, 1, 7, 64, 65, 4095], "empty": [0, 0, 0], "ends-empty": [0, 300, 0], "even": [256, 256, 256, 256], "one": [513]}


def k_grouped_truth(a: torch.Tensor, b: torch.Tensor, begins: list[int], sizes: list[int]) -> torch.Tensor:
    parts = [a[begin : begin + size].float().t() @ b[begin : begin + size].float() for begin, size in zip(begins, sizes, strict=True)]
    return torch.stack(parts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", K_SIZES.values(), ids=K_SIZES)
@pytest.mark.parametrize("m,n", [(2048, 768), (264, 520)])
@pytest.mark.parametrize("layout", ["sizes", "ks_cpu", "psum"])
def test_k_grouped(check, sizes, m, n, dtype, layout):
    psum = layout == "psum"
    step = [aligned(size) if psum else size for size in sizes]
    begins = [sum(step[:group]) for group in range(len(sizes))]
    rows = sum(step) + (256 if psum else 0)
    a, b = normal(rows, m, seed=1), normal(rows, n, seed=2)
    used = torch.zeros(rows, dtype=torch.bool, device="cuda")
    for begin, size in zip(begins, sizes, strict=True):
        used[begin : begin + size] = True
    a[~used] = NAN
    b[~used] = NAN
    ends = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    grouped = torch.tensor(ends if psum else sizes, dtype=torch.int32, device="cuda")
    d = torch.full((len(sizes), m, n), NAN, dtype=dtype, device="cuda")
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, sizes if layout == "ks_cpu" else None, grouped, use_psum_layout=psum)
    check(d, k_grouped_truth(a, b, begins, sizes))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("aliased", [False, True])
def test_k_grouped_adds_c_and_leaves_empty_groups_as_they_are(check, dtype, aliased):
    sizes, m, n = [0, 200, 1, 65], 512, 768
    a, b = normal(sum(sizes), m, seed=1), normal(sum(sizes), n, seed=2)
    c = normal(len(sizes), m, n, seed=3).to(dtype)
    begins = [sum(sizes[:group]) for group in range(len(sizes))]
    truth = c.float() + k_grouped_truth(a, b, begins, sizes)
    untouched = c[0].clone()
    d = c if aliased else torch.full_like(c, NAN)
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, d, None, torch.tensor(sizes, dtype=torch.int32, device="cuda"), c)
    check(d, truth)
    assert_bitwise_equal(d[0], untouched)


# ---- all ---------------------------------------------------------------------------------------------------------------------------


def _three_calls() -> list[torch.Tensor]:
    index, ends, _ = contiguous_layout(GROUPS["ragged"])
    a, b = normal(len(index), 2048, seed=1), normal(8, 768, 2048, seed=2)
    grouped = torch.zeros(len(index), 768, dtype=torch.bfloat16, device="cuda")
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, grouped, ends, use_psum_layout=True)
    wgrad = torch.zeros(8, 768, 2048, device="cuda")
    deep_gemm.k_grouped_bf16_gemm_tn_contiguous(grouped, a, wgrad, None, ends, use_psum_layout=True)
    dense = torch.zeros(len(index), len(index), device="cuda")
    deep_gemm.bf16_gemm_nt(a, a, dense)
    return [grouped, wgrad, dense]


def test_same_bits_on_every_run():
    first = _three_calls()
    for _ in range(20):
        for name, again, once in zip(("m-grouped", "k-grouped", "dense"), _three_calls(), first, strict=True):
            assert_bitwise_equal(again, once, name=name)


def test_bits_do_not_depend_on_the_number_of_sms():
    first = _three_calls()
    try:
        for num_sms in (1, 2, 33, 64):
            deep_gemm.set_num_sms(num_sms)
            for again, once in zip(_three_calls(), first, strict=True):
                assert_bitwise_equal(again, once, name=f"{num_sms} SMs")
    finally:
        deep_gemm.set_num_sms(0)


def test_calls_do_not_wait_for_the_device_and_can_be_captured():
    _three_calls()
    index, ends, used = contiguous_layout(GROUPS["ragged"])
    a, b = normal(len(index), 512, seed=1), normal(8, 256, 512, seed=2)
    d = torch.zeros(len(index), 256, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, ends, use_psum_layout=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    once = d.clone()
    with torch.cuda.graph(graph):
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, ends, use_psum_layout=True)
    d.zero_()
    graph.replay()
    assert_bitwise_equal(d[used], once[used])
