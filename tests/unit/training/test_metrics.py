# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math
from pathlib import Path

from torchtitan_lr.training.history import read_history
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
