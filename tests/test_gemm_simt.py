"""The Hopper GEMM kernel without a GPU: its source and its launches as shipped, on the SIMT machine of tests/simt.

Properties: every epilogue and gathered rows match FP64, whatever the order of threads, copies and CTAs; nothing is read that the call has not
written (shared memory and padding rows are NaN), nothing past a group's end is written; faults put into the pipeline are found.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from simt.gemms import SimtGemms, group_bounds, pool
from simt.machine import INCLUDE, SimtError

from deep_gemm import gemm_launch
from deep_gemm.gemm_launch import Gate
from deep_gemm.testing import assert_close

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the SIMT machine needs a C++ compiler (g++)")

ORDERS = [0, 1, 2, 3, 4]  # forward, reversed, three random ones
GROUPS = {"partial": [70, 0, 200], "one_row": [1, 128], "whole": [0, 256, 128], "many_tiles": [128, 64, 1, 128, 256, 100]}
SHAPES = {"partial": (448, 320, 3), "one_row": (128, 128, 2), "whole": (320, 192, 2), "many_tiles": (384, 64, 1)}  # n, k, CTAs
BF16_ULP = 2**-8


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    return SimtGemms(tmp_path_factory.mktemp("gemm_simt"))


@pytest.fixture(params=ORDERS, ids=lambda order: f"order{order}")
def gemms(compiled, request):
    torch.manual_seed(request.param)
    with compiled.installed():
        compiled.order, compiled.tile = request.param, "pp192c1b8"
        yield compiled


def rounded(made: torch.Tensor, expected: torch.Tensor, name: str, ulps: float = 1.0) -> None:
    """`made` is the FP64 result `expected`, rounded to BF16 after FP32 sums. ulps: of BF16, relative to the largest result for cancellation."""
    bound = ulps * BF16_ULP * expected.abs() + 1e-5 * expected.abs().max()
    bad = ~((made.double() - expected).abs() <= bound)
    assert not bad.any(), f"{name}: {bad.sum()} of {bad.numel()} elements, the first at {bad.nonzero()[0].tolist()}"


# ---- store ---------------------------------------------------------------------------------------------------------------------------


def m_grouped(rows, n, k, ctas, gathered=False, b_major="k"):
    bounds, ends, size = group_bounds(rows)
    a, b = pool(bounds, size, k), torch.randn(len(rows), n, k).bfloat16()
    d = torch.full((size, n), 7.0).bfloat16()
    source, index = a, None
    if gathered:  # rows in a random order among others
        source = torch.full((2 * size, k), float("nan"), dtype=torch.bfloat16)
        index = torch.randperm(2 * size)[:size].to(torch.int32)
        source[index.long()] = a
        index[bounds[0][0] :: 13] = -1  # zeros
        a = torch.where(index[:, None] < 0, 0, a)
    weight = b if b_major == "k" else b.transpose(1, 2).contiguous()
    gemm_launch.launch_m_grouped(source, weight, d, ends, b_major=b_major, rows=index, num_sms=ctas, stream=0)
    outside = torch.ones(size, dtype=torch.bool)
    for group, (first, end) in enumerate(bounds):
        outside[first:end] = False
        if end > first:
            rounded(d[first:end], a[first:end].double() @ b[group].double().t(), f"d of group {group}")
    assert d[outside].eq(7).all(), "rows past a group's end were written"


@pytest.mark.parametrize("case", GROUPS)
def test_m_grouped_matches_fp64(case, gemms):
    m_grouped(GROUPS[case], *SHAPES[case])


def test_gathered_rows_match_fp64(gemms):
    for case, rows in GROUPS.items():
        m_grouped(rows, *SHAPES[case], gathered=True)


def test_clusters_share_tiles(gemms):
    gemms.tile = "pp192c2b16"
    m_grouped([70, 0, 200, 300], 448, 320, 4)


def test_k_grouped_adds_to_fp32(gemms):
    bounds, ends, size = group_bounds([70, 0, 200])
    a, b = pool(bounds, size, 160), pool(bounds, size, 192)
    d = torch.randn(3, 160, 192)
    expected = d.double()
    for group, (first, end) in enumerate(bounds):
        expected[group] += a[first:end].double().t() @ b[first:end].double()
    gemm_launch.launch_k_grouped(a, b, d, ends, accumulate=True, num_sms=3, stream=0)
    assert_close(d.double(), expected, rel_frobenius=1e-6, name="d")


# ---- gated epilogues -------------------------------------------------------------------------------------------------------------------


def gate_of(weights, biases=None):
    alpha, offset, clamp = (1.0, 0.0, float("inf")) if biases is None else (1.702, 1.0, 3.0)
    gate = (
        {} if biases is None else {"gate_bias": biases[0].data_ptr(), "up_bias": biases[1].data_ptr(), "bias_stride": biases[0].stride(0)}
    )
    return Gate(alpha, offset, clamp, row_weight=weights.data_ptr(), row_weight_stride=4, **gate)


def activation(z, biases, group, bias_on):
    """act(z + b) in FP64, of BF16 z [rows, 2I]."""
    gate, up = z.chunk(2, dim=1)
    if not bias_on:
        return gate * torch.sigmoid(gate) * up
    gate, up = gate + biases[0][group].double(), up + biases[1][group].double()
    gate, up = gate.clamp(max=3.0), up.clamp(-3.0, 3.0) + 1.0
    return gate * torch.sigmoid(1.702 * gate) * up


@pytest.mark.parametrize("with_biases", [False, True])
def test_swiglu_epilogue(with_biases, gemms):
    rows, width, hidden = [70, 0, 200], 224, 192
    bounds, ends, size = group_bounds(rows)
    x, (w_gate, w_up) = pool(bounds, size, hidden, scale=0.3), torch.randn(2, 3, width, hidden).bfloat16()
    weights, biases = torch.rand(size) + 0.5, torch.randn(2, 3, width).bfloat16()
    a, z = torch.full((size, width), float("nan")).bfloat16(), torch.full((size, 2 * width), float("nan")).bfloat16()
    gate = gate_of(weights, biases if with_biases else None)
    gemm_launch.launch_swiglu(x, w_gate, w_up, a, ends, gate, z=z, num_sms=3, stream=0)
    for group, (first, end) in enumerate(bounds):
        if end == first:
            continue
        rounded(z[first:end], x[first:end].double() @ torch.cat([w_gate[group], w_up[group]]).double().t(), "z")
        expected = weights[first:end, None].double() * activation(z[first:end].double(), biases, group, with_biases)
        rounded(a[first:end], expected, "a")


@pytest.mark.parametrize("in_place", [False, True])
def test_dswiglu_epilogue(in_place, gemms):
    rows, width, hidden, with_biases = [70, 0, 200], 224, 192, in_place
    bounds, ends, size = group_bounds(rows)
    dy, w2 = pool(bounds, size, hidden, scale=0.3), torch.randn(3, hidden, width).bfloat16()
    z, weights, biases = pool(bounds, size, 2 * width), torch.rand(size) + 0.5, torch.randn(2, 3, width).bfloat16()
    z_before, act = z.clone(), torch.full((size, width), float("nan")).bfloat16()
    dz = z if in_place else torch.full_like(z, float("nan"))
    row_dp = torch.full((gemm_launch.dp_parts(width), size), float("nan"))
    gate = gate_of(weights, biases if with_biases else None)
    gemm_launch.launch_dswiglu(dy, w2, z, dz, act, row_dp, ends, gate, num_sms=2, stream=0)
    for group, (first, end) in enumerate(bounds):
        if end == first:
            continue
        inside, da, p = slice(first, end), dy[first:end].double() @ w2[group].double(), weights[first:end, None].double()
        z64 = z_before[inside].double().requires_grad_()
        a = activation(z64, biases, group, with_biases)
        (dz64,) = torch.autograd.grad(a, z64, p * da)
        assert_close(dz[inside].double(), dz64, rel_frobenius=3e-3, name="dz")
        rounded(act[inside], p * a.detach(), "act")
        assert_close(row_dp[:, inside].sum(0).double(), (da * a.detach()).sum(1), rel_frobenius=1e-5, name="dp")


# ---- the machine finds faults ----------------------------------------------------------------------------------------------------------


def changed_headers(folder, file, old, new):
    """A copy of the project's headers with one text replaced."""
    shutil.copytree(INCLUDE, folder)
    text = (folder / file).read_text(encoding="utf-8")
    assert text.count(old) >= 1, f"{file} no longer has {old!r}"
    (folder / file).write_text(text.replace(old, new), encoding="utf-8")
    return folder


FAULTS = {
    "wrong_phase": (
        "mainloop/sm90_load_role.cuh",
        "ring.empty[at.stage].wait(at.phase ^ 1)",
        "ring.empty[at.stage].wait(at.phase)",
        r"dead-lock(.|\n)*warp 8 lanes 0-31: mbarrier smem\+0x\w+, parity 0 \(0 phases done",
    ),
    "no_wait_for_wgmma": ("mainloop/sm90_math_role.cuh", "cute::warpgroup_wait<0>();", "", "CTA . thread .*WGMMA: "),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_the_pipeline_are_found(fault, tmp_path):
    *change, message = FAULTS[fault]
    broken = SimtGemms(tmp_path, changed_headers(tmp_path / "changed", *change))
    broken.timeout_s = 0.5
    with broken.installed(), pytest.raises(SimtError, match=message):
        m_grouped(GROUPS["partial"], *SHAPES["partial"])
