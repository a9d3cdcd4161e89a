# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The package is made of rooms that import downwards, and needs neither scripts nor tests."""

from unittest.mock import patch

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

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


def test_a_files_name_occurs_once():
    """In another room it would be another thing; commands are named as what they call."""
    files = (ROOT / "torchtitan_lr").rglob("*.py")
    names = [file.name for file in files if file.parent.name != "commands"]
    twice = {name for name in names if names.count(name) > 1}
    assert twice == {"__init__.py"}
