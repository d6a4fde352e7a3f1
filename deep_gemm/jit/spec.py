"""What to compile: a kernel template, the values of its Config by name, and an architecture."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_QUALIFIED = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*")
_HEADER = re.compile(r"(?!/)(?!.*\.\.)[\w./-]+")
_ARCH = re.compile(r"sm_\d{2,3}[af]?")

# First line of every generated source; headers.SHIMS holds its text.
PRELUDE = "deep_gemm_prelude.h"


@dataclass(frozen=True)
class CppType:
    """A C++ type as a value of `KernelSpec.config`: CppType("__nv_bfloat16")."""

    name: str


Value = int | bool | float | CppType


def _float32(name: str, value: float) -> float:
    """`value` rounded to FP32."""
    try:
        if value - value == 0:
            return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        pass
    raise ValueError(f"config[{name!r}] = {value}, expected a finite float of FP32's range")


def _member(name: str, value: Value) -> str:
    if isinstance(value, CppType):
        return f"using {name} = {value.name};"
    if isinstance(value, bool):
        return f"static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        if -(2**31) <= value < 2**31:
            return f"static constexpr int {name} = {int(value)};"
        if -(2**63) < value < 2**63:
            return f"static constexpr long long {name} = {int(value)}LL;"
        raise ValueError(f"config[{name!r}] = {value}, expected an int of at most 64 bits")
    if isinstance(value, float):
        return f"static constexpr float {name} = {_float32(name, value).hex()}f;"  # hexadecimal: exact
    raise TypeError(f"config[{name!r}] is {value!r}, expected int, bool, float or CppType")


def _check(name: str, value: str, pattern: re.Pattern[str], expected: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"KernelSpec.{name} = {value!r}, expected {expected}")


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """One kernel of a template. Two specs are equal when they generate the same source for the same architecture.

    name        symbol of the kernel in the cubin, and its name in messages
    header      header that defines `entry`, as written between < >
    entry       template <class Config> __device__ void entry(const Params&), with its namespaces
    params      type of the single kernel argument (a struct of deep_gemm/layout/)
    config      members of Config: int, bool and float become `static constexpr`, a CppType becomes a `using`
    threads     of a CTA; min_blocks: CTAs per SM that the register allocation must allow
    arch        "sm_90a", "sm_100a": cubins are made for exactly this architecture
    """

    name: str
    header: str
    entry: str
    params: str
    config: Mapping[str, Value]
    threads: int
    arch: str
    min_blocks: int = 1
    source: str = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check("name", self.name, _IDENTIFIER, "a C identifier")
        _check("header", self.header, _HEADER, "a path relative to an include root")
        _check("entry", self.entry, _QUALIFIED, "a C++ name with its namespaces")
        _check("params", self.params, _QUALIFIED, "a C++ type name")
        _check("arch", self.arch, _ARCH, "an architecture such as 'sm_90a'")
        for key in self.config:
            _check("config key", key, _IDENTIFIER, "a C identifier")
        if not 1 <= self.threads <= 1024 or self.min_blocks < 1:
            raise ValueError(f"KernelSpec.threads = {self.threads}, min_blocks = {self.min_blocks}, expected 1..1024 and >= 1")
        object.__setattr__(self, "config", MappingProxyType(dict(self.config)))
        object.__setattr__(self, "source", self._generate())
        object.__setattr__(self, "_hash", hash((self.source, self.arch)))

    def _generate(self) -> str:
        members = "".join(f"  {_member(key, self.config[key])}\n" for key in sorted(self.config))
        return (
            f"#include <{PRELUDE}>\n#include <{self.header}>\n\nstruct Config {{\n{members}}};\n\n"
            f'extern "C" __global__ void __launch_bounds__({self.threads}, {self.min_blocks})\n'
            f"{self.name}(const __grid_constant__ {self.params} params) {{\n  {self.entry}<Config>(params);\n}}\n"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelSpec) and self.arch == other.arch and self.source == other.source

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):
        return KernelSpec, (self.name, self.header, self.entry, self.params, dict(self.config), self.threads, self.arch, self.min_blocks)

    def __str__(self) -> str:
        """`sm90_bf16_gemm(kBlockM=128, ...) for sm_90a`: the label in messages, logs and the cache."""
        shown = (f"{key}={value.name if isinstance(value, CppType) else value}" for key, value in sorted(self.config.items()))
        return f"{self.name}({', '.join(shown)}) for {self.arch}"
