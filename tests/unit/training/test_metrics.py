# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math
from pathlib import Path

import pytest

from torchtitan_lr.training.history import perplexity, read_history
from torchtitan_lr.training.metrics import HistoryLogger


def test_history_survives_non_finite_values_and_a_torn_line(tmp_path: Path) -> None:
    log = HistoryLogger(tmp_path / "runs" / "metrics.jsonl")
    log.log({"loss": 0.1 + 0.2, "norm": math.nan}, step=1)
    log.log({"loss": math.inf}, step=2)
    with log.path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert read_history(log.path) == [
        {"step": 1, "loss": 0.1 + 0.2, "norm": None},
        {"step": 2, "loss": None},
    ]
    assert all("NaN" not in line for line in log.path.read_text().splitlines())


@pytest.mark.parametrize("before", ["", '{"step": 1, "loss": 3.0}\n'], ids=["alone", "last"])
def test_the_record_after_a_torn_line_is_whole(before: str, tmp_path: Path) -> None:
    """A kill cuts a line off; without a whole one before it, a resume leaves the file as it is."""
    log = HistoryLogger(tmp_path / "metrics.jsonl")
    log.path.write_text(f'{before}{{"step": 2, "lo')
    log.log({"loss": 2.0}, step=2)
    log.log({"loss": 1.0}, step=3)
    assert read_history(log.path)[-2:] == [{"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.0}]
    assert len(log.path.read_text().splitlines()) == before.count("\n") + 3  # no empty line


def test_perplexity() -> None:
    assert perplexity(0.0) == 1.0
    assert math.isclose(perplexity(699.0), math.e**699)
    assert perplexity(1e4) == math.inf  # where `math.exp` raises
