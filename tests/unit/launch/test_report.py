# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the launcher says at the end."""

from pathlib import Path

import pytest

from torchtitan_lr.compat.elastic import Failure
from torchtitan_lr.launch.report import summary_lines


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ((5, -9, ""), "rank 5 was ended by SIGKILL"),
        ((5, -11, "Error: x"), "rank 5 failed: Error: x"),  # a crash in its cleanup
        ((5, 1, ""), "rank 5 failed with status 1"),
        ((None, None, "no store"), "no store"),
    ],
)
def test_a_failure_is_one_line(failure, said):
    assert str(Failure(*failure, Path("logs"))) == said


@pytest.mark.parametrize("value", ["a\x1b[31m", [1], {}, True, float("nan"), None])
def test_a_damaged_summary_costs_its_cells(value):
    summary = {"train_loss": 2.5, "steps": value, "mfu": value, "checkpoint": value}
    lines = summary_lines(summary, Path("a"), Path("b"))
    assert lines[0].split() == ["steps", "-"] and "2.5000" in lines[1]
    assert "".join(lines).isprintable()
