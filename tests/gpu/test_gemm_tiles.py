"""Every tile of the GEMM, whatever the table would choose, against FP64. Properties: results with an odd number of row blocks and of column
blocks, where CTAs of a cluster have no tile beside their peer's, contractions of one k block and of more than a lap of the ring, few SMs with
many tiles each and all of them; rows and columns that are not the result's keep their bits; 20 runs give the same bits."""

from __future__ import annotations

import pytest
import torch
from gemm_support import BF16, F32, NAN, Groups, compile_all, normal

from deep_gemm.gemm_config import TILES, GemmConfig
from deep_gemm.gemm_launch import NO_WINDOW
from deep_gemm.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu

RUNS, FEW_SMS = 20, 6
CLUSTERS = [name for name, tile in TILES.items() if tile.cluster > 1]
SIZES = [300, 1, 0, 129, 640, 77]  # 3, 1, 0, 2, 5 and 1 row blocks
K_SIZES = [0, 1, 200, 65, 0, 700]
LONG_K = 64 * 23  # no multiple of any number of stages


@pytest.fixture(scope="module", autouse=True)
def compiled(rehearsal):
    if rehearsal:
        return
    configs = [GemmConfig("m_ends", "k", "k", BF16, tile) for tile in TILES.values()]
    configs += [GemmConfig("m_index", "k", "k", BF16, TILES[name]) for name in CLUSTERS]
    compile_all(configs + [GemmConfig("k_ends", "mn", "mn", dtype, tile) for tile in TILES.values() for dtype in (BF16, F32)])


def columns(block_n: int, k: int) -> int:
    """Three column blocks, the last nearly whole, or so narrow that fewer columns are multiplied."""
    return 3 * block_n - 40 if k > 64 else 2 * block_n + 40


def same_bits(run, rehearsal: bool) -> torch.Tensor:
    """run(num_sms=...) again and again; what it gives."""
    first = run(num_sms=None)
    for i in range(1 if rehearsal else RUNS):
        for num_sms in (None, FEW_SMS):
            assert_bitwise_equal(run(num_sms=num_sms), first, name=f"run {i + 2}, num_sms = {num_sms}")
    return first


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("k", [64, LONG_K])
@pytest.mark.parametrize("how", ["store", "accumulate", "no map"])
def test_m_grouped(check, launches, force_tile, device, rehearsal, name, k, how):
    """accumulate: BF16 is read and added to, row by row. no map: rows of d begin at any address, element by element."""
    groups, n = Groups(SIZES, device), columns(force_tile(name).block_n, k)
    a, b = groups.rows(k, 1), normal(len(SIZES), n, k, seed=2, device=device)
    before = normal(groups.num_rows, n + 8, seed=3, device=device)
    inside = slice(1, n + 1) if how == "no map" else slice(n)

    def run(num_sms):
        whole = before.clone()
        launches.launch_m_grouped(a, b, whole[:, inside], groups.ends, b_major="k", accumulate=how == "accumulate", num_sms=num_sms)
        return whole

    whole = same_bits(run, rehearsal)
    for group, rows in enumerate(groups.slices):
        truth = a[rows].double() @ b[group].double().t()
        check(whole[rows, inside], truth + before[rows, inside].double() if how == "accumulate" else truth)
        whole[rows, inside] = before[rows, inside]
    assert_bitwise_equal(whole, before, name="rows without a group and columns beside d")


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("k", [64, LONG_K])
def test_m_grouped_by_index(check, launches, force_tile, device, rehearsal, name, k):
    """Row blocks do not pair up here: CTAs of a cluster take two columns of one, and one of three has no peer."""
    groups, n = Groups(SIZES, device), columns(force_tile(name).block_n, k)
    a, b = groups.rows(k, 1), normal(len(SIZES), n, k, seed=2, device=device)
    before = normal(groups.num_rows, n, seed=3, device=device)

    def run(num_sms):
        d = before.clone()
        launches.launch("m_index", a, b, d, m=len(d), layout=groups.index, num_groups=len(SIZES), window=(0, len(d)), num_sms=num_sms)
        return d

    d = same_bits(run, rehearsal)
    for group, rows in enumerate(groups.slices):
        check(d[rows], a[rows].double() @ b[group].double().t())
    assert_bitwise_equal(d[~groups.used], before[~groups.used], name="rows without a group")


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("capacity", [None, 256], ids=["whole", "windows"])
def test_k_grouped(check, launches, force_tile, device, rehearsal, name, dtype, accumulate, capacity):
    """Windows cut the group of 700 rows more than once; BF16 hands its sum on in the carry."""
    groups, m, n = Groups(K_SIZES, device), 3 * 128 - 40, columns(force_tile(name).block_n, LONG_K)
    a, b = groups.rows(m, 1), groups.rows(n, 2)
    before = normal(len(K_SIZES), m, n, seed=3, device=device).to(dtype)
    carry = torch.full((2, m, n), NAN, device=device) if dtype == BF16 and capacity else None

    def run(num_sms):
        d = before.clone() if accumulate else torch.full_like(before, NAN)
        for begin, end in groups.windows(capacity) if capacity else [NO_WINDOW]:
            launches.launch_k_grouped(
                a[begin:end], b[begin:end], d, groups.ends, window=(begin, end), carry=carry, accumulate=accumulate, num_sms=num_sms
            )
        return d

    d = same_bits(run, rehearsal)
    for group, rows in enumerate(groups.slices):
        truth = a[rows].double().t() @ b[rows].double()
        check(d[group], truth + before[group].double() if accumulate else truth)
        if accumulate and not K_SIZES[group]:
            assert_bitwise_equal(d[group], before[group], name="a group without rows")
