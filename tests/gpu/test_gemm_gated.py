"""The GEMMs with the gated activation in their epilogue against FP64. Properties: SwiGLU with every constant, bias and row weight, whether z is
saved or not; its gradient, also over z, with the partial sums of dp; widths that end inside a tile and a box; groups of every size, NaN in rows
of none; windows; every tile that serves them; rows that belong to no block keep their bits, and 20 runs give the same ones."""

from __future__ import annotations

import pytest
import torch
from gemm_support import BF16, UNTOUCHED, GatedCase, compile_all, dp_parts_of

from deep_gemm.activation import SwiGLU, resolve_activation
from deep_gemm.gemm_config import TILES, GemmConfig
from deep_gemm.testing import assert_bitwise_equal, assert_close

pytestmark = pytest.mark.gpu

RUNS, FEW_SMS = 20, 6
OAI = resolve_activation("swiglu_oai")
CASES = {
    "plain": {"activation": SwiGLU(), "biases": False, "weights": False},
    "weights": {"activation": SwiGLU(), "biases": False, "weights": True},
    "clamp": {"activation": SwiGLU(clamp=1.25), "biases": False, "weights": True},
    "oai": {"activation": OAI, "biases": False, "weights": False},
    "biases": {"activation": SwiGLU(), "biases": True, "weights": False},
    "all": {"activation": SwiGLU(alpha=1.702, up_offset=1.0, clamp=2.0), "biases": True, "weights": True},
}
WIDTHS = [128, 200, 768, 1536]
ODD = 480  # five columns of tiles forward, three backward
GATED_TILES = [name for name, tile in TILES.items() if tile.pingpong and tile.block_n == 192]


@pytest.fixture(scope="module", autouse=True)
def compiled(rehearsal):
    if not rehearsal:
        gated = (("swiglu", "k"), ("dswiglu", "mn"))
        compile_all([GemmConfig("m_ends", "k", b, BF16, TILES[name], epilogue) for name in GATED_TILES for epilogue, b in gated])


def check_rounded(actual: torch.Tensor, truth: torch.Tensor, name: str) -> None:
    """BF16 of the truth but for the rare element that lies between two, where the smallest error decides. A sum that was rounded on the way, or one
    that was not where it should be, is off in every third element."""
    assert ((actual.double() - truth).abs() <= 2**-7 * truth.abs() + 1e-5 * truth.abs().max()).all(), name
    differ = (actual != truth.to(BF16)).double().mean().item()
    assert differ < 0.01, f"{name}: {differ:.2%} of the elements are not the truth's BF16"


def check_untouched(case: GatedCase, *results: torch.Tensor) -> None:
    """Rows between a group's end and the next multiple of 128 may hold anything; those after the last group are nobody's."""
    spare = slice(case.groups.num_rows - case.groups.spare, None)
    assert all((result[spare] == UNTOUCHED).all() for result in results), "rows behind the last group were written"


def check_swiglu(check, case: GatedCase, a: torch.Tensor, z: torch.Tensor) -> None:
    used, truth = case.used, case.true_z()
    check(z[used], truth[used])
    check(a[used], (case.weight * case.activated(truth.to(BF16).double()))[used])
    check_rounded(a[used], (case.weight * case.activated(z.double()))[used], "a")
    check_untouched(case, a, z)


def check_dswiglu(check, case: GatedCase, dz: torch.Tensor, act: torch.Tensor, row_dp: torch.Tensor) -> None:
    used, (true_dz, true_act, products) = case.used, case.true_gradients()
    check(dz[used], true_dz[used])
    check_rounded(dz[used], true_dz[used], "dz")
    check_rounded(act[used], true_act[used], "act")
    assert_close(row_dp[used], dp_parts_of(products)[used], rel_frobenius=1e-4, max_row_rel=1e-3, row_floor=1.0, name="row_dp")
    assert_close(row_dp[used].sum(1), products[used].sum(1), rel_frobenius=1e-4, name="dp")
    assert (row_dp[~used] == UNTOUCHED).all(), "dp of a row without a group was written"
    check_untouched(case, dz, act)


def same_bits(case: GatedCase, rehearsal: bool, run) -> None:
    first = run(num_sms=None)
    for i in range(1 if rehearsal else RUNS):
        for num_sms in (None, FEW_SMS):
            for name, again, once in zip(("first", "second", "third"), run(num_sms=num_sms), first, strict=False):
                assert_bitwise_equal(again[case.used], once[case.used], name=f"{name} result of run {i + 2}, num_sms = {num_sms}")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_swiglu(check, launches, force_tile, device, name, width):
    force_tile("pp192c2b16")
    case = GatedCase(width, device, **CASES[name])
    a, z = case.swiglu(launches, save_z=True)
    check_swiglu(check, case, a, z)
    alone, untouched = case.swiglu(launches, save_z=False)
    assert_bitwise_equal(alone[case.used], a[case.used], name="a without z")
    assert (untouched == UNTOUCHED).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CASES)
def test_dswiglu(check, launches, force_tile, device, name, width):
    force_tile("pp192c2b16")
    case = GatedCase(width, device, **CASES[name])
    apart = case.dswiglu(launches)
    check_dswiglu(check, case, *apart)
    for result, over, once in zip(("dz", "act", "row_dp"), case.dswiglu(launches, over_z=True), apart, strict=True):
        assert_bitwise_equal(over[case.used], once[case.used], name=f"{result} with dz over z")


@pytest.mark.parametrize("tile", GATED_TILES)
def test_every_tile_with_columns_that_have_no_peer(check, launches, force_tile, device, rehearsal, tile):
    force_tile(tile)
    case = GatedCase(ODD, device, **CASES["all"])
    check_swiglu(check, case, *case.swiglu(launches, save_z=True))
    check_dswiglu(check, case, *case.dswiglu(launches))
    same_bits(case, rehearsal, lambda num_sms: case.swiglu(launches, save_z=True, num_sms=num_sms))
    same_bits(case, rehearsal, lambda num_sms: case.dswiglu(launches, over_z=True, num_sms=num_sms))


@pytest.mark.parametrize("name", ["plain", "all"])
def test_windows_give_the_bits_of_the_whole(launches, force_tile, device, name):
    """Of 256 rows: they cut a group, and the one after the last holds nothing."""
    force_tile("pp192c2b16")
    case = GatedCase(ODD, device, **CASES[name])
    used = case.used
    for cut, once in zip(case.swiglu(launches, save_z=True, capacity=256), case.swiglu(launches, save_z=True), strict=True):
        assert_bitwise_equal(cut[used], once[used])
        check_untouched(case, cut)
    for cut, once in zip(case.dswiglu(launches, over_z=True, capacity=256), case.dswiglu(launches), strict=True):
        assert_bitwise_equal(cut[used], once[used])


@pytest.mark.parametrize("sizes", [[0, 0, 0], [1], [0, 128, 0]], ids=str)
def test_few_rows(check, launches, force_tile, device, sizes):
    force_tile("pp192c2b16")
    case = GatedCase(ODD, device, **CASES["all"], sizes=sizes)
    check_swiglu(check, case, *case.swiglu(launches, save_z=True)) if any(sizes) else check_untouched(
        case, *case.swiglu(launches, save_z=True)
    )
    check_dswiglu(check, case, *case.dswiglu(launches)) if any(sizes) else check_untouched(case, *case.dswiglu(launches))
