# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchtitan_lr.training.history import read_history
from torchtitan_lr.training.metrics import HistoryLogger, set_wandb_environment

VARIABLES = ("WANDB_PROJECT", "WANDB_RUN_NAME", "WANDB_RUN_GROUP", "WANDB_TAGS", "WANDB_MODE")
QUIET = "WANDB_SILENT"


def wandb_config(**overrides: Any) -> Any:
    metrics = {
        "enable_wandb": True,
        "wandb_project": "low-rank",
        "wandb_run_name": "run 7",
        "wandb_group": "ranks",
        "wandb_tags": ["a", "b"],
        "wandb_mode": "auto",
    }
    return SimpleNamespace(metrics=SimpleNamespace(**(metrics | overrides)))


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in (*VARIABLES, QUIET, "WANDB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


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


@pytest.mark.usefixtures("clean_environment")
def test_wandb_gets_the_tomls_values_and_stays_offline_without_credentials() -> None:
    set_wandb_environment(wandb_config())
    assert [os.environ[v] for v in VARIABLES] == ["low-rank", "run 7", "ranks", "a,b", "offline"]
    assert os.environ[QUIET] == "true"


@pytest.mark.usefixtures("clean_environment")
def test_the_environment_wins_and_credentials_mean_online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    set_wandb_environment(wandb_config())
    assert os.environ["WANDB_PROJECT"] == "mine"
    assert os.environ["WANDB_MODE"] == "online"
