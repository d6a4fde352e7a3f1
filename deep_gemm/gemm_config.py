"""Which variant of the BF16 GEMM kernel serves a problem.

A variant is a kind of problem (who the rows belong to, how operands lie, what leaves) and a tile: shape, schedule, cluster, stages. The tile comes
from `gemm_table.json`, which `scripts/bench/tune_gemm.py` measures on a GPU, or, for shapes that it does not have, from `estimate`.
DG_PRINT_CONFIG=1 prints every choice.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from . import _C, environment
from .jit import CppType, KernelSpec

BLOCK_M, BLOCK_K = 128, 64
THREADS = 384  # two math warpgroups, one of loads and schedule
SMEM_LIMIT = 232448  # bytes of shared memory that one CTA can have on sm_90
D_TYPES = {torch.bfloat16: ("bf16", "__nv_bfloat16"), torch.float32: ("f32", "float")}
TABLE = Path(__file__).with_name("gemm_table.json")


@dataclass(frozen=True)
class Tile:
    """How a CTA works through the result. `name` is its key in the table: pp192c2b16 = ping-pong, 128 x 192, clusters of 2, bands of 16."""

    block_n: int
    num_stages: int
    pingpong: bool  # each math warpgroup takes whole tiles in turn, instead of half of every tile
    cluster: int = 1  # CTAs that share an operand tile: 1 or 2
    band: int = 8  # row blocks that sweep the columns together
    staging_boxes: int = 2  # per math warpgroup

    @property
    def name(self) -> str:
        return f"{'pp' if self.pingpong else 'co'}{self.block_n}c{self.cluster}b{self.band}"


TILES = {
    tile.name: tile
    for tile in (
        Tile(192, 4, True),
        Tile(192, 4, True, cluster=2, band=8),
        Tile(192, 4, True, cluster=2, band=16),
        Tile(256, 4, False),
        Tile(256, 4, False, cluster=2, band=8),
        Tile(256, 4, False, cluster=2, band=16),
        Tile(128, 6, True),
    )
}
"""All tiles that are measured and shipped."""


@dataclass(frozen=True)
class GemmConfig:
    """One compiled variant; its name is its print, cache label and benchmark label."""

    kind: str  # key of _C.gemm_kinds()
    a_major: str  # "k" or "mn"
    b_major: str
    d_dtype: torch.dtype
    tile: Tile
    epilogue: str = "store"  # key of _C.gemm_epilogues()
    gather: str = "none"  # key of _C.gemm_gathers(): the operand whose rows are listed

    @property
    def name(self) -> str:
        epilogue = "" if self.epilogue == "store" else f"_{self.epilogue}"
        epilogue += "" if self.gather == "none" else f"_gather_{self.gather}"
        return f"sm90_bf16_gemm_{self.kind}{epilogue}_a{self.a_major}_b{self.b_major}_{D_TYPES[self.d_dtype][0]}_{self.tile.name}"

    @property
    def staging_boxes(self) -> int:
        return {"store": self.tile.staging_boxes, "swiglu": 0, "dswiglu": 3}[self.epilogue]

    @property
    def smem_bytes(self) -> int:
        return _C.gemm_smem_bytes(BLOCK_M, self.tile.block_n, BLOCK_K, self.tile.num_stages, self.staging_boxes)

    def spec(self) -> KernelSpec:
        params = "GemmParams" if self.epilogue == "store" else "GemmGatedParams"
        return KernelSpec(
            name=self.name,
            header="deep_gemm/kernels/sm90_bf16_gemm.cuh",
            entry="deep_gemm::kernels::sm90_bf16_gemm",
            params=params,
            config={
                "Params": CppType(params),
                "kEpilogue": _C.gemm_epilogues()[self.epilogue],
                "kGather": _C.gemm_gathers()[self.gather],
                "kKind": _C.gemm_kinds()[self.kind],
                "kPingPong": self.tile.pingpong,
                "kCluster": self.tile.cluster,
                "kBand": self.tile.band,
                "kBlockM": BLOCK_M,
                "kBlockN": self.tile.block_n,
                "kBlockK": BLOCK_K,
                "kNumStages": self.tile.num_stages,
                "kStagingBoxes": self.staging_boxes,
                "kAMajorK": self.a_major == "k",
                "kBMajorK": self.b_major == "k",
                "D": CppType(D_TYPES[self.d_dtype][1]),
            },
            threads=THREADS,
            arch="sm_90a",
        )


def choose_config(
    kind: str, a_major: str, b_major: str, d_dtype: torch.dtype, m: int, n: int, k: int, num_sms: int, epilogue: str = "store", gather: str = "none"
) -> GemmConfig:
    """m, n, k: the sizes that the host knows; rows of all groups together where these are m or k."""
    if gather != "none":  # gathered tiles cannot be shared by a cluster
        return GemmConfig(kind, a_major, b_major, d_dtype, TILES["pp192c1b8"], epilogue, gather)
    # What a tile's choice depends on, so that the cache does not grow with every new number of rows.
    rows = m if kind == "dense" else 0
    return _choose(kind, a_major, b_major, d_dtype, rows, m if kind == "k_ends" else 0, n, 0 if kind == "k_ends" else k, num_sms, epilogue)


@functools.lru_cache(maxsize=4096)
def _choose(kind, a_major, b_major, d_dtype, rows, m, n, k, num_sms, epilogue) -> GemmConfig:
    measured = None if kind == "dense" else _table().get((group_of(kind), b_major, epilogue, m or k, n))
    tile = TILES[measured] if measured else estimate(kind, epilogue, rows, n, k, num_sms)
    if num_sms < tile.cluster:
        tile = TILES["pp192c1b8"]
    config = GemmConfig(kind, a_major, b_major, d_dtype, tile, epilogue)
    if environment.flag("DG_PRINT_CONFIG"):
        print(f"deep_gemm: m={rows or m or '*'} n={n} k={k or '*'}: {config.name} ({'measured' if measured else 'estimated'})")
    return config


def group_of(kind: str) -> str:
    """The part of a kind that the table knows: how groups are given does not change which tile is best."""
    return "k" if kind == "k_ends" else "m"


@functools.cache
def _table() -> dict[tuple[str, str, str, int, int], str]:
    """(m- or k-grouped, major of b, epilogue, the other known size, n) -> tile name."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["rows"] if TABLE.exists() else []
    return {(row["group"], row["b_major"], row["epilogue"], row["size"], row["n"]): row["tile"] for row in rows}


LONG_K = 6144  # from here on CTAs that drift apart no longer find each other's operands in the L2 (docs/perf/gemm.md)
_BLOCK_CYCLES = {192: 768, 256: 1024, 128: 576}  # tensor-core cycles of one k block; 128 x 128 reads more per FLOP than shared memory gives
_TILE_CYCLES = {True: 400, False: 3500}  # of a tile beside its k blocks, by ping-pong: what the epilogue does not hide


def estimate(kind: str, epilogue: str, rows: int, n: int, k: int, num_sms: int) -> Tile:
    """The tile for a shape that was not measured. rows: of a dense problem, else 0."""
    if epilogue != "store":
        return TILES["pp192c2b16"]
    if kind == "k_ends":
        return TILES["pp192c1b8" if n > 128 else "pp128c1b8"]
    if kind == "dense":
        return min((TILES[name] for name in ("pp192c2b16", "co256c2b16", "pp128c1b8")), key=lambda t: dense_cycles(t, rows, n, k, num_sms))
    if n <= 128:
        return TILES["pp128c1b8"]
    return TILES["co256c2b16" if k >= LONG_K else "pp192c2b16"]


def dense_cycles(tile: Tile, m: int, n: int, k: int, num_sms: int) -> float:
    """Cycles of the CTA that has most tiles."""
    tiles = -(-m // BLOCK_M) * -(-n // tile.block_n)
    per_tile = -(-k // BLOCK_K) * _BLOCK_CYCLES[tile.block_n] + _TILE_CYCLES[tile.pingpong]
    return -(-tiles // num_sms) * per_tile


def shipped_specs() -> list[KernelSpec]:
    """The variants that the public calls and the Mega MoE use: every kind with every tile that the table or `estimate` can name for it."""
    bf16, f32 = torch.bfloat16, torch.float32
    wide, narrow = ("pp192c2b16", "co256c2b16"), ("pp128c1b8",)
    measured = {(key[0], key[2]): set() for key in _table()}
    for key, tile in _table().items():
        measured[key[0], key[2]].add(tile)
    m_tiles = sorted({*wide, *narrow, *measured.get(("m", "store"), ())})
    k_tiles = sorted({"pp192c1b8", *narrow, *measured.get(("k", "store"), ())})
    configs = [GemmConfig("dense", a, b, d, TILES[t]) for a in ("k", "mn") for b in ("k", "mn") for d in (bf16, f32) for t in wide + narrow]
    configs += [GemmConfig("m_ends", "k", b, d, TILES[t]) for b in ("k", "mn") for d in (bf16, f32) for t in m_tiles]
    configs += [GemmConfig("m_index", "k", b, d, TILES[t]) for b in ("k", "mn") for d in (bf16, f32) for t in m_tiles]
    configs += [GemmConfig("m_masked", "k", "k", d, TILES[t]) for d in (bf16, f32) for t in m_tiles]
    configs += [GemmConfig("k_ends", "mn", "mn", d, TILES[t]) for d in (bf16, f32) for t in k_tiles]
    configs += [GemmConfig("m_ends", "k", b, bf16, TILES[t], e) for e, b in (("swiglu", "k"), ("dswiglu", "mn"))
                for t in sorted({"pp192c2b16", *measured.get(("m", e), ())})]  # fmt: skip
    configs += [choose_config("m_ends", "k", b, bf16, 0, 0, 0, 1, e, "a") for e, b in (("store", "k"), ("swiglu", "k"), ("dswiglu", "mn"))]
    configs += [choose_config("k_ends", "mn", "mn", d, 0, 0, 0, 1, "store", g) for d in (bf16, f32) for g in ("a", "b")]
    return list(dict.fromkeys(config.spec() for config in configs))
