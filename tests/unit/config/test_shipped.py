# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Shipped files are found by name from any folder; a user's own file comes first."""

import pytest

from tests.commands import ROOT
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.parse import load_toml
from torchtitan_lr.config.paths import find_config, near_configs
from torchtitan_lr.errors import ConfigError

SHIPPED = str(ROOT / "train_configs" / "debug_cola.toml")


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        *("debug_cola", "debug_cola.toml", "./debug_cola"),
        *("train_configs/debug_cola.toml", "./train_configs/debug_cola.toml"),
    ],
)
def test_a_name_is_found_from_any_folder(elsewhere, text):
    assert find_config(text) == SHIPPED


def test_the_own_file_comes_first(elsewhere):
    for name in ("debug_cola.toml", "debug_full"):
        (elsewhere / name).write_text("[training]\nsteps = 7\n")
        assert find_config(name) == name
    assert build_job_config(["--job.config_file=debug_full"]).training.steps == 7
    assert find_config("debug_cola") == SHIPPED


def test_a_wrong_name_is_refused_with_near_ones(elsewhere):
    with pytest.raises(ConfigError) as info:
        build_job_config(["--job.config_file=cola_6m"])
    text = str(info.value)
    assert text.startswith("job.config_file: got 'cola_6m', expected a TOML file such as ")
    assert "did you mean cola_60m" in text and "\n" not in text
    with pytest.raises(ConfigError) as info:
        load_toml("zzzz")
    assert "did you mean" not in str(info.value) and near_configs("zzzz") == ""


@pytest.mark.parametrize(
    ("overrides", "warmup"),
    [
        ([], 839),  # of 8,393 steps
        (["--training.steps=100"], 10),
        (["--training.steps=100", "--lr_scheduler.warmup_steps=50"], 50),
    ],
)
def test_a_trial_of_a_few_steps_is_not_all_warm_up(overrides, warmup):
    config = build_job_config(["--job.config_file=cola_60m", *overrides])
    assert config.lr_scheduler.warmup_steps == warmup


@pytest.mark.parametrize(
    ("text", "overrides", "warmup"),
    [
        ('include = "cola_60m"\n[training]\nsteps = 100', [], 10),
        ('include = "cola_60m"\n[lr_scheduler]\nwarmup_steps = 9000', [], 9000),  # as it says
        ("[training]\nsteps = 100", [], 2),  # torchtitan's 200 of 10,000
        ("[lr_scheduler]\nwarmup_steps = 7", ["--lr_scheduler.warmup_ratio=0.5"], 5000),
    ],
)
def test_nor_is_a_file_that_sets_the_steps(tmp_path, text, overrides, warmup):
    (tmp_path / "mine.toml").write_text(text + "\n")
    config = build_job_config([f"--job.config_file={tmp_path}/mine.toml", *overrides])
    assert config.lr_scheduler.warmup_steps == warmup


def test_warm_up_is_said_once(tmp_path):
    (tmp_path / "mine.toml").write_text("[lr_scheduler]\nwarmup_steps = 3\nwarmup_ratio = 0.5\n")
    message = r"^lr_scheduler\.warmup_ratio: got 0\.5, expected either it or warmup_steps$"
    with pytest.raises(ConfigError, match=message):
        build_job_config([f"--job.config_file={tmp_path}/mine.toml"])
