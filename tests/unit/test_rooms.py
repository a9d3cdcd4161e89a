# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The package is made of rooms that import downwards, of files and functions one can read."""

import ast
from unittest.mock import patch

import pytest
from importlinter.cli import EXIT_STATUS_ERROR, EXIT_STATUS_SUCCESS, lint_imports

from tests.commands import ROOT

PACKAGE = ROOT / "torchtitan_lr"
FILES = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
TESTS = sorted((ROOT / "tests").rglob("*.py"))
CONTRACTS = (ROOT / "pyproject.toml").read_text().partition("[tool.importlinter]")[2]
CONTRACTS = CONTRACTS.partition("[tool.pytest")[0]


def lint(text, folder):
    """Exit status of import-linter for contracts as in pyproject.toml."""
    file = folder / "contracts.toml"
    file.write_text(f"[tool.importlinter]{text}")
    # It configures logging, which disables the loggers that other tests read.
    with patch("importlinter.cli.logging_config.dictConfig"):
        return lint_imports(config_filename=str(file), no_cache=True)


def test_rooms_import_downwards(tmp_path):
    assert lint(CONTRACTS, tmp_path) == EXIT_STATUS_SUCCESS


@pytest.mark.parametrize(("low", "high"), [("errors", "tools"), ("models | data", "parallel")])
def test_an_import_upwards_would_be_noticed(low, high, tmp_path):
    swapped = CONTRACTS.replace(f'"{low}"', "LOW").replace(f'"{high}"', f'"{low}"')
    assert lint(swapped.replace("LOW", f'"{high}"'), tmp_path) == EXIT_STATUS_ERROR


def test_a_runtime_that_imports_formulas_would_be_noticed(tmp_path):
    meeting = "torchtitan_lr.ledger.comparison -> torchtitan_lr.formulas.traffic"
    assert lint(CONTRACTS.replace(f'"{meeting}"', ""), tmp_path) == EXIT_STATUS_ERROR


def test_the_top_level_holds_folders():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "errors.py", "train.py"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_can_be_read(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_of_tests_can_be_read(path):
    assert len(path.read_text().splitlines()) <= 400
