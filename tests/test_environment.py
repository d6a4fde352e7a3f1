"""Environment variables: code, table and documentation name the same ones; a wrong value is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from jit_helpers import REPOSITORY

from deep_gemm import environment


def test_documented_variables_are_those_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| (.+) \|$", (REPOSITORY / "docs" / "environment.md").read_text(), re.MULTILINE)
    assert rows == [(variable.name, variable.default, variable.meaning) for variable in environment.VARIABLES.values()]


def test_every_variable_that_the_package_names_is_in_the_table():
    named = set()
    for path in (REPOSITORY / "deep_gemm").rglob("*.py"):
        if path != Path(environment.__file__):
            constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            named |= {value for value in constants if isinstance(value, str) and re.fullmatch(r"DG_[A-Z_]+", value)}
    assert named == environment.VARIABLES.keys(), "each is used, and each that is used is documented"


def test_flag_other_than_0_or_1_is_refused(monkeypatch):
    monkeypatch.setenv("DG_DEBUG", "yes")
    with pytest.raises(ValueError, match="DG_DEBUG = 'yes', expected 0 or 1"):
        environment.flag("DG_DEBUG")
    monkeypatch.delenv("DG_DEBUG")
    assert environment.flag("DG_DEBUG") is False
