"""What the tests and benchmarks share.

numeric.py     error measures, bounds                  generators.py  model shapes, routings, tensors, all from a seed
timing.py      events, medians, alternation, cold L2   results.py     results/*.json with the environment they came from
torch_path.py  the trainer-style MoE layer in torch    moe_cases.py   one Mega MoE call against the oracle and the torch path
virtual.py     R expert-parallel ranks on one GPU
"""

from __future__ import annotations

import importlib

_HOMES = {
    "Errors": "numeric",
    "assert_bitwise_equal": "numeric",
    "assert_close": "numeric",
    "measure_errors": "numeric",
    "MODEL_SHAPES": "generators",
    "ROUTINGS": "generators",
    "VirtualGroup": "virtual",
}

__all__ = ["MODEL_SHAPES", "ROUTINGS", "Errors", "VirtualGroup", "assert_bitwise_equal", "assert_close", "measure_errors"]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
