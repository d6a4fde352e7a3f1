"""GEMMs whose rows are listed. Property: the bits of the same GEMM, with the same tile, on rows that were copied first, for lists in any order,
with repeats and with -1 for zeros, groups of every size, and rows of NaN wherever no group looks."""

from __future__ import annotations

import pytest
import torch
from gemm_support import BF16, F32, NAN, UNTOUCHED, GatedCase, Groups, compile_all, normal

import deep_gemm
from deep_gemm.activation import SwiGLU
from deep_gemm.gemm_config import TILES, GemmConfig
from deep_gemm.gemm_launch import Gather
from deep_gemm.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu

TILE = "pp192c1b8"  # the one that gathers
SIZES = [0, 1, 7, 64, 65, 4095]
SOURCE_ROWS = 777  # and one of NaN, which nobody asks for


@pytest.fixture(scope="module", autouse=True)
def compiled(rehearsal):
    if rehearsal:
        return
    kinds = [("m_ends", "k", "k", BF16, "store", "a"), ("m_index", "k", "k", BF16, "store", "a")]
    kinds += [("m_ends", "k", "k", BF16, "swiglu", "a"), ("m_ends", "k", "mn", BF16, "dswiglu", "a")]
    kinds += [("k_ends", "mn", "mn", dtype, "store", operand) for dtype in (BF16, F32) for operand in ("a", "b")]
    copied = {(*kind, "none") for *kind, _ in kinds}
    compile_all([GemmConfig(*kind, TILES[TILE], epilogue, gather) for *kind, epilogue, gather in [*kinds, *sorted(copied, key=str)]])


@pytest.fixture(autouse=True)
def one_tile(force_tile):
    force_tile(TILE)


ORDERS = {
    "random": lambda rows: rows,
    "sorted": lambda rows: rows.sort().values,
    "falling": lambda rows: rows.sort(descending=True).values,
    "last": lambda rows: torch.full_like(rows, SOURCE_ROWS - 1),
    "none": lambda rows: torch.full_like(rows, -1),
}


def listed(groups: Groups, order: str = "random") -> torch.Tensor:
    """A source row for every row of `groups`, -1 for one in eight; rows of no group name the row of NaN."""
    generator = torch.Generator(groups.device).manual_seed(9)
    rows = torch.randint(SOURCE_ROWS, (groups.num_rows,), generator=generator, device=groups.device)
    rows = ORDERS[order](rows).masked_fill(torch.rand(len(rows), generator=generator, device=groups.device) < 0.125, -1)
    return torch.where(groups.used, rows, SOURCE_ROWS).int()


def source_of(width: int, device, seed: int = 1) -> torch.Tensor:
    """Rows that do not follow each other closely."""
    wide = normal(SOURCE_ROWS + 1, width + 8, seed=seed, device=device)
    wide[SOURCE_ROWS] = NAN
    wide[:, width:] = NAN
    return wide[:, :width]


def copied(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return source[rows.long().clamp(min=0)].masked_fill(rows[:, None] < 0, 0.0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("k", [72, 320])
def test_m_grouped(check, launches, device, order, k):
    """k = 72: the second block has 8 columns."""
    groups, n = Groups(SIZES, device), 200
    source, rows, b = source_of(k, device), listed(groups, order), normal(len(SIZES), n, k, seed=2, device=device)
    a, results = copied(source, rows), []
    for options in ({"a": source, "rows": rows}, {"a": a, "rows": None}):
        d = torch.full((groups.num_rows, n), UNTOUCHED, dtype=BF16, device=device)
        launches.launch_m_grouped(options["a"], b, d, groups.ends, b_major="k", rows=options["rows"])
        assert (d[~groups.used] == UNTOUCHED).all()
        results.append(d)
    assert_bitwise_equal(*results)
    for group, part in enumerate(groups.slices):
        check(results[0][part], a[part].double() @ b[group].double().t())
    assert (results[0][groups.used & (rows < 0)] == 0).all()


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("m, n", [(264, 520), (128, 64)])
def test_k_grouped(check, launches, device, operand, order, dtype, m, n):
    """264 rows are three row blocks, the last of 8."""
    groups = Groups(SIZES, device)
    rows, widths = listed(groups, order), {"a": m, "b": n}
    source = source_of(widths[operand], device)
    dense = {name: copied(source, rows) if name == operand else groups.rows(widths[name], 3) for name in ("a", "b")}
    results = []
    for gather in (Gather(operand, source, rows), None):
        operands = dense | ({operand: None} if gather else {})
        results.append(torch.full((len(SIZES), m, n), NAN, dtype=dtype, device=device))
        launches.launch_k_grouped(operands["a"], operands["b"], results[-1], groups.ends, gather=gather)
    assert_bitwise_equal(*results)
    for group, part in enumerate(groups.slices):
        check(results[0][group], dense["a"][part].double().t() @ dense["b"][part].double())


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_k_grouped_adds_up_over_windows(check, launches, device, operand, dtype):
    groups, m, n = Groups(SIZES, device, spare=1024), 264, 520
    rows, widths = listed(groups), {"a": m, "b": n}
    source, before = source_of(widths[operand], device), normal(len(SIZES), m, n, seed=4, device=device).to(dtype)
    dense = {name: copied(source, rows) if name == operand else groups.rows(widths[name], 3) for name in ("a", "b")}
    results = []
    for gathered in (True, False):
        d, carry = before.clone(), torch.full((2, m, n), NAN, device=device)
        for window in groups.windows(1024):
            part = slice(*window)
            operands = {name: t[part] for name, t in dense.items()} | ({operand: None} if gathered else {})
            launches.launch_k_grouped(operands["a"], operands["b"], d, groups.ends, gather=Gather(operand, source, rows[part]) if gathered else None,
                                      window=window, carry=carry if dtype == BF16 else None, accumulate=True)  # fmt: skip
        results.append(d)
    assert_bitwise_equal(*results)
    for group, part in enumerate(groups.slices):
        check(results[0][group], before[group].double() + dense["a"][part].double().t() @ dense["b"][part].double())


@pytest.mark.parametrize("capacity", [None, 256], ids=["whole", "windows"])
@pytest.mark.parametrize("width", [200, 768])
def test_gated(launches, device, width, capacity):
    case = GatedCase(width, device, activation=SwiGLU(alpha=1.702, up_offset=1.0, clamp=2.0), biases=True, weights=True)
    rows, source = listed(case.groups), source_of(case.x.shape[1], device)
    case.x = case.dy = copied(source, rows)
    for run in (lambda **options: case.swiglu(launches, save_z=True, **options), lambda **options: case.dswiglu(launches, **options)):
        for gathered, once in zip(run(source=source, rows=rows, capacity=capacity), run(), strict=True):
            assert_bitwise_equal(gathered[case.used], once[case.used])


# ---- public calls ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(rehearsal):
    """Without torch in place of the kernels. What is remembered here has this tile; it is found again only at these addresses."""
    if rehearsal:
        pytest.skip("--on-cpu: this test is about the GPU")


@pytest.mark.parametrize("psum", [False, True], ids=["index", "psum"])
def test_public_m_grouped(on_gpu, psum):
    groups, n, k = Groups(SIZES), 200, 320
    source, rows, b = source_of(k, "cuda"), listed(groups), normal(len(SIZES), n, k, seed=2)
    layout, results = groups.ends if psum else groups.index, []
    for a, a_rows in ((source, rows), (copied(source, rows), None)):
        d = torch.full((groups.num_rows, n), UNTOUCHED, dtype=BF16, device="cuda")
        if a_rows is None:
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, groups.ends, use_psum_layout=True)
        else:
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=psum, a_rows=a_rows)
        results.append(d)
    assert_bitwise_equal(*results)


@pytest.mark.parametrize("operand", ["a", "b"])
def test_public_k_grouped_with_groups_close_together(on_gpu, check, operand):
    """Groups begin anywhere, inside a k block and inside 16 bytes of the list."""
    count, widths = sum(SIZES), {"a": 264, "b": 520}
    source = source_of(widths[operand], "cuda")
    rows = torch.randint(-1, SOURCE_ROWS, (count,), device="cuda", dtype=torch.int32)
    dense = {name: copied(source, rows) if name == operand else normal(count, widths[name], seed=3) for name in ("a", "b")}
    sizes, results = torch.tensor(SIZES, dtype=torch.int32, device="cuda"), []
    for options in ({f"{operand}_rows": rows}, {}):
        operands = dense | ({operand: source} if options else {})
        results.append(torch.full((len(SIZES), widths["a"], widths["b"]), NAN, device="cuda"))
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(operands["a"], operands["b"], results[-1], None, sizes, **options)
    assert_bitwise_equal(*results)
    for group, (a, b) in enumerate(zip(dense["a"].split(SIZES), dense["b"].split(SIZES), strict=True)):
        check(results[0][group], a.double().t() @ b.double())
