# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs that finished on one machine do not run again on another."""

import pytest

from scripts.research import result_tables

PAGE = result_tables.PAGE.read_text()


@pytest.mark.parametrize("name", result_tables.placed(PAGE))
def test_the_page_has_the_tables_of_the_stored_runs(name: str) -> None:
    assert result_tables.with_tables(PAGE, name) == PAGE, (
        "run python -m scripts.research.result_tables"
    )
