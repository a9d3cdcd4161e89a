# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Options of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full``: everything that a default run draws from, too (the nightly job)."""
    parser.addoption("--full", action="store_true", help="the whole matrices, not a share of them")
