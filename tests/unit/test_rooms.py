# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The package is made of rooms that import downwards, and needs neither scripts nor tests."""

from unittest.mock import patch

import pytest
from importlinter.cli import EXIT_STATUS_ERROR, EXIT_STATUS_SUCCESS, lint_imports

from tests.commands import ROOT

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


@pytest.mark.parametrize(("low", "high"), [("errors", "commands"), ("models | data", "parallel")])
def test_an_import_upwards_would_be_noticed(low, high, tmp_path):
    swapped = CONTRACTS.replace(f'"{low}"', "LOW").replace(f'"{high}"', f'"{low}"')
    assert lint(swapped.replace("LOW", f'"{high}"'), tmp_path) == EXIT_STATUS_ERROR


def test_a_runtime_that_imports_formulas_would_be_noticed(tmp_path):
    meeting = "torchtitan_lr.ledger.comparison -> torchtitan_lr.formulas.traffic"
    assert lint(CONTRACTS.replace(f'"{meeting}"', ""), tmp_path) == EXIT_STATUS_ERROR


def test_an_import_from_the_tests_would_be_noticed(tmp_path):
    """The same contract against a package that is imported."""
    wrong = CONTRACTS.replace(
        'forbidden_modules = ["scripts", "tests"]', 'forbidden_modules = ["tqdm"]'
    )
    assert wrong != CONTRACTS and lint(wrong, tmp_path) == EXIT_STATUS_ERROR
