"""All environment variables of the library; docs/environment.md is checked against this table, and only this file reads a DG_ variable.

Values are read at each use, so that a test or a notebook can set them after the import."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    name: str
    default: str
    meaning: str


VARIABLES = {
    variable.name: variable
    for variable in (
        Variable(
            "DG_CACHE_DIR", "~/.cache/deep_gemm", "Folder of compiled kernels. May be shared by processes and nodes, and may be read-only."
        ),
        Variable("DG_JIT_VERBOSE", "0", "1: print each compilation with its time, registers and spills, and where each kernel came from."),
        Variable("DG_PRINT_CONFIG", "0", "1: print the configuration that a call chose, once per configuration."),
        Variable("DG_TIMEOUT_S", "60", "Seconds that a rank waits for a peer before the call fails; read when a buffer is made."),
        Variable(
            "DG_FUSED_BACKWARD",
            "0",
            "1: the fused backend's backward is one launch, too. It is right, and slower than the staged one so far (docs/fused_backward.md).",
        ),
        Variable(
            "DG_DEBUG", "0", "1: check the values of CUDA tensors (expert ids) at the call, with a host sync, instead of reporting later."
        ),
    )
}


def text(name: str) -> str:
    """Value of the variable, or its default when unset or empty; the name must be in the table."""
    return os.environ.get(name) or VARIABLES[name].default


def flag(name: str) -> bool:
    """Value of a 0/1 variable."""
    value = text(name)
    if value not in ("0", "1"):
        raise ValueError(f"{name} = {value!r}, expected 0 or 1")
    return value == "1"
