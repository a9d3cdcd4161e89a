# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Paths: what a command or a file names, expanded once and the same for every check and use."""

import operator
from pathlib import Path

import pytest

from torchtitan_lr.commands.main import COMMANDS, parser_of
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.paths import user_path
from torchtitan_lr.errors import ConfigError

KEYS = (
    *("job.dump_folder", "job.save_config_file", "checkpoint.folder"),
    *("checkpoint.initial_load_path", "model.hf_assets_path", "model.flavor"),
    *("training.dataset_path", "training.token_folder", "validation.dataset_path"),
    *("metrics.save_tb_folder", "profiling.save_traces_folder", "comm.save_traces_folder"),
    *("profiling.save_memory_snapshot_folder", "parallelism.pipeline_parallel_schedule_csv"),
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "big"))
    return tmp_path


@pytest.mark.parametrize(("written", "expected"), [("~/a b", "a b"), ("${SCRATCH}/c", "big/c")])
def test_every_path_of_a_configuration_is_expanded(home: Path, written: str, expected: str) -> None:
    config = build_job_config([f"--{key}={written}" for key in KEYS])
    found = {key: operator.attrgetter(key)(config) for key in KEYS}
    assert found == dict.fromkeys(KEYS, str(home / expected))


def test_paths_of_a_mixture_are_expanded(home: Path) -> None:
    (home / "a.toml").write_text('[[training.mixture]]\ndataset = "local"\npath = "~/b.txt"\n')
    config = build_job_config(["--job.config_file=~/a.toml"])
    assert config.training.mixture[0]["path"] == str(home / "b.txt")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_output_of_a_command_is_expanded(home: Path, name: str) -> None:
    found = [action for action in parser_of(name)._actions if action.dest == "out"]
    for action in found:
        assert callable(action.type) and action.type("~/x") == home / "x"
    assert found or name not in {"prepare", "tokenizer", "export", "import", "sweep", "scaling"}


def test_a_variable_that_is_not_set_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMPTY", "")
    for path in ("${NO_SUCH_NAME}/x", "${EMPTY}/x"):
        with pytest.raises(ConfigError, match=r"^job\.dump_folder: got .*/x', expected .* is set"):
            build_job_config([f"--job.dump_folder={path}"])
    with pytest.raises(SystemExit):
        parser_of("prepare").parse_args(["a.txt", "--out=${NO_SUCH_NAME}/x"])
    assert "--out: got '${NO_SUCH_NAME}/x', expected a path whose" in capsys.readouterr().err
    assert user_path("a$b/$HOME", "x") == Path("a$b/$HOME")  # as before: only braces are ours
