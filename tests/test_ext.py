"""The host extension. Properties: a struct packed by field name has the C compiler's layout, and a wrong field is named; a launch and a
tensor map reach the driver with every argument in its place (against a stand-in built with the real cuda.h); limits are checked before the
driver is asked; the driver is found at the first use."""

from __future__ import annotations

import ctypes
import itertools
import re
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep_gemm import _C
from deep_gemm.jit import compiler, driver

TESTS = Path(__file__).resolve().parent
CSRC, INCLUDE = TESTS.parent / "csrc", TESTS.parent / "deep_gemm" / "include"
MAX_RANKS = 72
EXAMPLE = {
    "num_rows": -3,
    "a": bytes(range(128)),
    "d": 2**63 + 1,
    "scale": 1.5,
    "symm": [5, 2**64 - 1],
    "flags": 2**32 - 1,
    "row_stride": -(2**63),
    "epoch": 2**64 - 1,
}


def packed_by_hand(values):
    """ExampleParams with the alignments of C: tensor maps 64, 64-bit fields 8."""
    symm = [*values["symm"], *[0] * (MAX_RANKS - len(values["symm"]))]
    before = struct.pack("<i60x128sQf4x", values["num_rows"], values["a"], values["d"], values["scale"])
    return before + struct.pack(f"<{MAX_RANKS}QI4xqQ24x", *symm, values["flags"], values["row_stride"], values["epoch"])


# --- pack


@given(
    num_rows=st.integers(-(2**31), 2**31 - 1),
    a=st.binary(min_size=128, max_size=128),
    d=st.integers(0, 2**64 - 1),
    scale=st.floats(width=32),
    symm=st.lists(st.integers(0, 2**64 - 1), max_size=MAX_RANKS) | st.tuples(st.integers(0, 2**64 - 1)),
    flags=st.integers(0, 2**32 - 1),
    row_stride=st.integers(-(2**63), 2**63 - 1),
    epoch=st.integers(0, 2**64 - 1),
)
def test_pack_gives_the_layout_of_c(**values):
    assert _C.pack("ExampleParams", **values) == packed_by_hand(values)


def test_fields_may_come_in_any_order():
    assert _C.pack("ExampleParams", **dict(reversed(EXAMPLE.items()))) == _C.pack("ExampleParams", **EXAMPLE)


@pytest.mark.parametrize("name", _C.struct_names())
def test_fields_of_every_struct_follow_each_other_without_overlap(name):
    sizes = {"tensor_map": (128, 64), "pointer": (8, 8), "i32": (4, 4), "i64": (8, 8), "u32": (4, 4), "u64": (8, 8), "f32": (4, 4)}
    sizes["peers"] = (8 * MAX_RANKS, 8)
    end, alignment = 0, 1
    for field, kind, offset, size in _C.struct_fields(name):
        assert (size, offset) == (sizes[kind][0], -(-end // sizes[kind][1]) * sizes[kind][1]), field
        end, alignment = offset + size, max(alignment, sizes[kind][1])
    assert _C.struct_size(name) == -(-end // alignment) * alignment


@pytest.mark.parametrize(
    ("field", "value", "error", "text"),
    [
        ("num_rows", 2**31, ValueError, "ExampleParams: num_rows = 2147483648, expected -2147483648..2147483647"),
        ("num_rows", 1.0, TypeError, "ExampleParams: num_rows is 1.0, expected an int"),
        ("a", b"short", ValueError, "ExampleParams: a has 5 bytes, expected a tensor map of 128"),
        ("a", 7, TypeError, "ExampleParams: a is 7, expected bytes"),
        ("d", -1, ValueError, "ExampleParams: d = -1, expected 0..2^64-1"),
        ("d", None, TypeError, "ExampleParams: d is None, expected an int"),
        ("scale", 1e39, ValueError, "ExampleParams: scale = 1e+39 does not fit in f32"),
        ("scale", "x", TypeError, "ExampleParams: scale is 'x', expected a float"),
        ("symm", [0] * 73, ValueError, "ExampleParams: symm has 73 addresses, expected at most 72"),
        ("symm", [0, -1], ValueError, "ExampleParams: symm[1] = -1, expected 0..2^64-1"),
        ("symm", 5, TypeError, "ExampleParams: symm is 5, expected a tuple or list"),
        ("flags", -1, ValueError, "ExampleParams: flags = -1, expected 0..4294967295"),
        ("row_stride", 2**63, ValueError, "ExampleParams: row_stride = 9223372036854775808, expected"),
        ("epoch", 2**64, ValueError, "ExampleParams: epoch = 18446744073709551616, expected 0..2^64-1"),
    ],
)
def test_wrong_field_value_is_named(field, value, error, text):
    with pytest.raises(error, match=re.escape(text)):
        _C.pack("ExampleParams", **{**EXAMPLE, field: value})


def test_unknown_and_missing_fields_are_named():
    with pytest.raises(TypeError, match="ExampleParams has no field 'rows'"):
        _C.pack("ExampleParams", rows=1, **EXAMPLE)
    with pytest.raises(TypeError, match=r"ExampleParams: field epoch \(u64\) is missing"):
        _C.pack("ExampleParams", **{name: value for name, value in EXAMPLE.items() if name != "epoch"})
    with pytest.raises(ValueError, match="'NoParams' is not in layout/all_structs.h"):
        _C.pack("NoParams")
    with pytest.raises(TypeError, match="0 positional"):
        _C.pack(**EXAMPLE)


# --- launch and tensor_map


@pytest.fixture(scope="module")
def fake_library(tmp_path_factory):
    library = tmp_path_factory.mktemp("fake") / "fake_driver.so"
    command = [
        "cc",
        "-std=c11",
        "-shared",
        "-fPIC",
        f"-I{compiler.toolchain().cuda_include}",
        str(TESTS / "fake_driver.c"),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    fake = ctypes.CDLL(str(library))
    fake.fake_value.restype = ctypes.c_uint64
    fake.fake_reset.argtypes = [ctypes.c_int, ctypes.c_size_t]
    return fake


NO_DRIVER = {"cuCtxGetCurrent": 0, "cuLaunchKernelEx": 0, "cuTensorMapEncodeTiled": 0}


class FakeDriver:
    def __init__(self, library):
        self.library = library
        self.reset()

    def reset(self, status=0, params_size=0):
        self.library.fake_reset(status, params_size)

    def __getitem__(self, name):
        name, _, index = name.partition(":")
        return self.library.fake_value(name.encode(), int(index or 0))

    def addresses(self):
        library = self.library
        functions = {
            "cuCtxGetCurrent": library.fake_get_context,
            "cuLaunchKernelEx": library.fake_launch,
            "cuTensorMapEncodeTiled": library.fake_encode,
        }
        return {name: ctypes.cast(function, ctypes.c_void_p).value for name, function in functions.items()}


@pytest.fixture
def fake(fake_library):
    fake = FakeDriver(fake_library)
    _C.set_driver(**fake.addresses())
    yield fake
    _C.set_driver(**NO_DRIVER)
    driver.connect.cache_clear()


def test_launch_passes_everything_on(fake):
    params = bytes(i % 251 for i in range(832))
    fake.reset(params_size=len(params))
    assert _C.launch(0x1234, params, (8, 3, 2), 384, 200_000, 0x7FFF_0000_1000, 4, True, True) is None
    expected = {
        "function": 0x1234, "grid_x": 8, "grid_y": 3, "grid_z": 2, "block_x": 384, "block_y": 1, "block_z": 1, "smem": 200_000,
        "stream": 0x7FFF_0000_1000, "num_attributes": 3, "extra": 0, "attribute:0": fake["ATTRIBUTE_CLUSTER"], "cluster_x:0": 4,
        "cluster_y:0": 1, "cluster_z:0": 1, "attribute:1": fake["ATTRIBUTE_COOPERATIVE"], "cooperative:1": 1,
        "attribute:2": fake["ATTRIBUTE_PDL"], "pdl:2": 1,
    }  # fmt: skip
    assert {name: fake[name] for name in expected} == expected
    assert fake["params_address"] % 64 == 0
    assert bytes(fake[f"param:{i}"] for i in range(len(params))) == params


@pytest.mark.parametrize(
    ("options", "attribute"),
    [
        ((), None),
        ((2,), "ATTRIBUTE_CLUSTER"),
        ((1, True), "ATTRIBUTE_COOPERATIVE"),
        ((1, False, True), "ATTRIBUTE_PDL"),
        ((1, False, False), None),
    ],
)
def test_only_asked_attributes_are_passed(fake, options, attribute):
    _C.launch(1, b"", 2, 32, 0, 0, *options)
    assert fake["num_attributes"] == (attribute is not None)
    if attribute:
        assert fake["attribute:0"] == fake[attribute]
    assert (fake["grid_x"], fake["grid_y"], fake["grid_z"]) == (2, 1, 1)


def test_params_are_aligned_whatever_their_address(fake):
    for size in range(1, 400, 37):
        _C.launch(1, bytes(size), 1, 32, 0, 0)
        assert fake["params_address"] % 64 == 0


def test_driver_error_has_number_and_configuration(fake):
    fake.reset(status=701)
    with pytest.raises(RuntimeError, match=r"CUresult 701 \(grid 6 x 1 x 1, block 64, 128 bytes of dynamic shared memory, cluster 2\)"):
        _C.launch(1, b"", 6, 64, 128, 0, 2)
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled failed with CUresult 701"):
        _C.tensor_map(256, "bf16", (64,), (), (64,), 128)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({2: 0}, ValueError, "grid = 0, expected 1.."),
        ({2: (1, 65536)}, ValueError, "grid[1] = 65536, expected 1..65535"),
        ({2: (1, 1, 1, 1)}, ValueError, "grid has 4 elements, expected at most 3"),
        ({2: 5, 6: 2}, ValueError, "grid = 5, expected a multiple of cluster = 2"),
        ({3: 1025}, ValueError, "block = 1025, expected 1..1024"),
        ({4: -1}, ValueError, "smem = -1"),
        ({5: None}, TypeError, "stream is None"),
        ({6: 17}, ValueError, "cluster = 17, expected 1..16"),
        ({1: bytes(40000)}, ValueError, "params has 40000 bytes"),
    ],
)
def test_wrong_launch_argument_is_named_before_the_driver_is_asked(fake, changes, error, text):
    arguments = [1, b"", 2, 32, 0, 0, 1]
    for position, value in changes.items():
        arguments[position] = value
    with pytest.raises(error, match=re.escape(text)):
        _C.launch(*arguments)
    assert fake["num_launches"] == 0


def test_tensor_map_passes_everything_on(fake):
    made = _C.tensor_map(0x7F00_0000_0040, "bf16", (2**32, 1000, 7), (4096, 2**40 - 16), (64, 256, 1), 128)
    assert made == bytes(255 - i for i in range(128))
    expected = {
        "address": 0x7F00_0000_0040, "rank": 3, "dims:0": 2**32, "dims:1": 1000, "dims:2": 7, "strides:0": 4096, "strides:1": 2**40 - 16,
        "box:0": 64, "box:1": 256, "box:2": 1, "element_strides:0": 1, "element_strides:1": 1, "element_strides:2": 1, "interleave": 0,
        "dtype": fake["bf16"], "swizzle": fake["swizzle_128"], "l2_promotion": fake["promotion_256"], "oob_fill": fake["oob_zero"],
    }  # fmt: skip
    assert {name: fake[name] for name in expected} == expected
    assert fake["map_address"] % 64 == 0


@pytest.mark.parametrize("dtype", ["u8", "u16", "u32", "i32", "u64", "i64", "f16", "f32", "f64", "bf16"])
def test_tensor_map_enumerators_are_those_of_cuda_h(fake, dtype):
    elements = 128 // int(re.sub(r"\D", "", dtype))  # 16 bytes
    for swizzle, promotion in itertools.product((0, 32, 64, 128), (0, 64, 128, 256)):
        _C.tensor_map(16, dtype, (elements,), (), (elements,), swizzle, l2_promotion=promotion)
        seen = (fake["dtype"], fake["swizzle"], fake["l2_promotion"], fake["oob_fill"])
        assert seen == (fake[dtype], fake[f"swizzle_{swizzle}"], fake[f"promotion_{promotion}"], fake["oob_zero"])
    if "f" in dtype:
        _C.tensor_map(16, dtype, (elements,), (), (elements,), 0, oob="nan")
        assert fake["oob_fill"] == fake["oob_nan"]


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"address": 24}, ValueError, "address = 24, expected a non-zero multiple of 16"),
        ({"address": 0}, ValueError, "address = 0"),
        ({"dtype": "bfloat16"}, ValueError, "dtype = 'bfloat16', expected one of u8"),
        ({"dims": (64, 0)}, ValueError, "dims[1] = 0, expected 1..4294967296"),
        ({"dims": (64, 2**32 + 1)}, ValueError, "dims[1] = 4294967297"),
        ({"dims": (64,)}, ValueError, "have 1, 1, 2 elements"),
        ({"dims": (1,) * 6}, ValueError, "dims has 6 elements, expected at most 5"),
        ({"strides_bytes": (136,)}, ValueError, "strides_bytes[0] = 136, expected a multiple of 16"),
        ({"strides_bytes": (2**40,)}, ValueError, "strides_bytes[0] = 1099511627776"),
        ({"strides_bytes": (128, 128)}, ValueError, "have 2, 2, 2 elements"),
        ({"box": (64, 257)}, ValueError, "box[1] = 257, expected 1..256"),
        ({"box": (72, 8)}, ValueError, "box[0] = 72 elements of bf16 = 144 bytes, expected at most swizzle_bytes = 128"),
        ({"box": (4, 8)}, ValueError, "box[0] = 4 elements of bf16 = 8 bytes, expected a multiple of 16"),
        ({"swizzle_bytes": 96}, ValueError, "swizzle_bytes = 96, expected 0, 32, 64 or 128"),
        ({"l2_promotion": 32}, ValueError, "l2_promotion = 32, expected 0, 64, 128 or 256"),
        ({"oob": "one"}, ValueError, "oob = 'one', expected 'zero' or 'nan'"),
        ({"oob": "nan", "dtype": "u16"}, ValueError, "oob = 'nan' with dtype u16"),
        ({"dims": 64}, TypeError, "dims is 64, expected a tuple or list"),
        ({"dims": (64, 1.5)}, TypeError, "dims[1] is 1.5, expected an int"),
    ],
)
def test_wrong_tensor_map_argument_is_named_before_the_driver_is_asked(fake, changes, error, text):
    good = {"address": 256, "dtype": "bf16", "dims": (64, 8), "strides_bytes": (128,), "box": (64, 8), "swizzle_bytes": 128}
    _C.tensor_map(**good)
    with pytest.raises(error, match=re.escape(text)):
        _C.tensor_map(**{**good, **changes})
    assert fake["num_maps"] == 1


def test_driver_is_found_at_the_first_use(fake, monkeypatch):
    _C.set_driver(**NO_DRIVER)
    calls = []
    monkeypatch.setattr(driver, "connect", lambda: calls.append(_C.set_driver(**fake.addresses())))
    for _ in range(2):
        _C.launch(1, b"", 1, 32, 0, 0)
    assert len(calls) == 1 and fake["num_launches"] == 2
    monkeypatch.undo()
    for name in NO_DRIVER:
        with pytest.raises(ValueError, match=f"{name} = 1,.* expected three addresses"):
            _C.set_driver(**{**NO_DRIVER, name: 1})


@pytest.mark.parametrize("use", [lambda: _C.launch(1, b"", 1, 32, 0, 0), lambda: _C.tensor_map(256, "bf16", (64,), (), (64,), 128)])
def test_thread_without_a_context_gets_one_first(fake, monkeypatch, use):
    asked = []

    def bind():
        asked.append((fake["num_launches"], fake["num_maps"]))
        fake.library.fake_set_context(ctypes.c_uint64(1))

    monkeypatch.setattr(driver, "bind_thread", bind)
    use()
    assert not asked
    fake.reset()
    fake.library.fake_set_context(ctypes.c_uint64(0))
    use()
    use()
    assert asked == [(0, 0)] and fake["num_launches"] + fake["num_maps"] == 2
    fake.library.fake_set_context(ctypes.c_uint64(0))
    monkeypatch.setattr(driver, "bind_thread", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        use()
    assert fake["num_launches"] + fake["num_maps"] == 2


# --- the build


def test_sources_compile_without_warnings():
    command = ["cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-c", "-o", "/dev/null", "-DPy_LIMITED_API=0x030A0000"]
    command += [f"-I{INCLUDE}", f"-I{sysconfig.get_paths()['include']}"]
    for source in sorted(CSRC.glob("*.c")):
        subprocess.run([*command, str(source)], check=True)
