"""Which variant of the GEMM serves a problem: every choice is one that ships and fits a CTA, whatever the shape, table or number of SMs."""

from __future__ import annotations

import json

import pytest
import torch

from deep_gemm import gemm_config
from deep_gemm.gemm_config import SMEM_LIMIT, TILES, GemmConfig, choose_config, shipped_specs

BF16 = torch.bfloat16
SHAPES = [(1, 8), (64, 64), (65, 128), (129, 64), (768, 2048), (2048, 768), (4096, 7168), (7168, 2048), (24576, 1536)]  # n, k


@pytest.fixture
def table(tmp_path, monkeypatch):
    """table(rows): the table that choose_config reads."""

    def write(rows):
        path = tmp_path / "table.json"
        path.write_text(json.dumps({"rows": rows}))
        monkeypatch.setattr(gemm_config, "TABLE", path)
        gemm_config._table.cache_clear()
        gemm_config._choose.cache_clear()

    yield write
    monkeypatch.undo()
    gemm_config._table.cache_clear()
    gemm_config._choose.cache_clear()


def every_choice(num_sms=132):
    for n, k in SHAPES:
        for m in (0, 1, 128, 4096, 131072):
            yield from (choose_config("dense", a, b, d, m, n, k, num_sms) for a in ("k", "mn") for b in ("k", "mn") for d in (BF16, torch.float32))
            yield from (choose_config(kind, "k", b, BF16, m, n, k, num_sms) for kind in ("m_ends", "m_index") for b in ("k", "mn"))
            yield choose_config("m_masked", "k", "k", BF16, m, n, k, num_sms)
            yield from (choose_config("k_ends", "mn", "mn", d, m, n, k, num_sms) for d in (BF16, torch.float32))
            yield from (choose_config("m_ends", "k", b, BF16, m, n, k, num_sms, e) for e, b in (("swiglu", "k"), ("dswiglu", "mn")))
            yield from (choose_config("m_ends", "k", b, BF16, m, n, k, num_sms, e, "a") for e, b in (("swiglu", "k"), ("dswiglu", "mn")))
            yield from (choose_config("k_ends", "mn", "mn", torch.float32, m, n, k, num_sms, gather=g) for g in ("a", "b"))


@pytest.mark.parametrize("num_sms", [2, 3, 131, 132])
def test_every_choice_is_shipped_and_fits_a_cta(num_sms):
    shipped = set(shipped_specs())
    for config in every_choice(num_sms):
        assert config.spec() in shipped, config
        assert config.smem_bytes <= SMEM_LIMIT, config


def test_one_sm_gets_no_cluster():
    assert {config.tile.cluster for config in every_choice(num_sms=1)} == {1}


def test_every_tile_fits_with_every_epilogue_that_takes_it():
    for tile in TILES.values():
        for epilogue, b in (("store", "k"), ("swiglu", "k"), ("dswiglu", "mn")):
            if epilogue == "store" or (tile.pingpong and tile.block_n == 192):
                assert GemmConfig("m_ends", "k", b, BF16, tile, epilogue).smem_bytes <= SMEM_LIMIT


def test_grouped_choices_do_not_depend_on_the_number_of_rows():
    for n, k in SHAPES:
        assert len({choose_config("m_ends", "k", "k", BF16, m, n, k, 132) for m in (0, 1, 128, 131072)}) == 1


def test_a_measured_shape_takes_what_the_table_says_and_others_do_not(table):
    table([{"group": "m", "b_major": "k", "epilogue": "store", "size": 2048, "n": 1536, "tile": "co256c1b8"}])
    assert choose_config("m_ends", "k", "k", BF16, 0, 1536, 2048, 132).tile.name == "co256c1b8"
    assert choose_config("m_index", "k", "k", BF16, 0, 1536, 2048, 132).tile.name == "co256c1b8"
    assert choose_config("m_ends", "k", "mn", BF16, 0, 1536, 2048, 132).tile.name != "co256c1b8"
    assert choose_config("m_ends", "k", "k", BF16, 0, 1536, 2056, 132).tile.name != "co256c1b8"


def test_the_shipped_table_names_tiles_that_there_are():
    rows = json.loads(gemm_config.TABLE.read_text())["rows"] if gemm_config.TABLE.exists() else []
    assert {row["tile"] for row in rows} <= TILES.keys()
    assert len({(r["group"], r["b_major"], r["epilogue"], r["size"], r["n"]) for r in rows}) == len(rows)


def test_a_short_dense_problem_takes_small_tiles_so_that_all_sms_work():
    small = choose_config("dense", "k", "k", BF16, 128, 8192, 4096, 132)
    assert small.tile.block_n < choose_config("dense", "k", "k", BF16, 8192, 8192, 8192, 132).tile.block_n


def test_choices_are_printed(monkeypatch, capsys, table):
    table([])
    monkeypatch.setenv("DG_PRINT_CONFIG", "1")
    choose_config("m_ends", "k", "k", BF16, 0, 1536, 2048, 132)
    assert "n=1536 k=2048" in (out := capsys.readouterr().out) and "estimated" in out
