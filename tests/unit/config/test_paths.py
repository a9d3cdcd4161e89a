# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Paths: what a command or a file names, expanded once and the same for every check and use."""

from pathlib import Path
from typing import Any

import pytest

from torchtitan_lr.commands.main import COMMANDS, parser_of
from torchtitan_lr.config.build import build_job_config, config_class
from torchtitan_lr.config.parse import load_toml
from torchtitan_lr.config.paths import find_config, user_path
from torchtitan_lr.errors import ConfigError

SECTIONS = ("job", "profiling", "metrics", "model", "training", "validation", "checkpoint", "comm")
NO_PATHS = {"wandb_project", "wandb_run_name", "wandb_group", "description", "name", "dataset"}
NO_PATHS |= {"custom_config_module", "text_column", "hf_name", "hf_split", "hf_held_out"}
NO_PATHS |= {
    "save_traces_file_prefix",
    "async_mode",
    "export_dtype",
    "config_file",
    "wandb_mode",
    "tokenizer_path",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "big"))
    return tmp_path


def path_keys() -> list[str]:
    """Return every key of the sections above whose value is a text and no known other thing."""
    found = []
    for section in SECTIONS:
        table = getattr(config_class()(), section)
        for name, value in vars(table).items():
            if (value is None or isinstance(value, str)) and name not in NO_PATHS:
                found.append(f"{section}.{name}")
    return found


@pytest.mark.parametrize("key", ["job.dump_folder", "checkpoint.folder", "training.token_folder"])
def test_the_list_of_keys_has(key: str) -> None:
    assert key in path_keys()


@pytest.mark.parametrize(("written", "expected"), [("~/a b", "a b"), ("${SCRATCH}/c", "big/c")])
def test_every_path_of_a_configuration_is_expanded(home: Path, written: str, expected: str) -> None:
    left = dict[str, Any]()
    for key in path_keys():
        config = build_job_config([f"--{key}={written}"])
        section, _, name = key.partition(".")
        if (value := getattr(getattr(config, section), name)) != str(home / expected):
            left[key] = value
    assert not left


def test_paths_of_a_mixture_are_expanded(home: Path) -> None:
    (home / "a.toml").write_text('[[training.mixture]]\ndataset = "local"\npath = "~/b.txt"\n')
    config = build_job_config(["--job.config_file=~/a.toml"])
    assert config.training.mixture[0]["path"] == str(home / "b.txt")


def test_a_file_is_found_and_included_below_home(home: Path) -> None:
    (home / "a.toml").write_text("[training]\nsteps = 7\n")
    (home / "b.toml").write_text('include = "${HOME}/a.toml"\n')
    assert load_toml(find_config("~/b.toml")) == {"training": {"steps": 7}}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_output_of_a_command_is_expanded(home: Path, name: str) -> None:
    found = [action for action in parser_of(name)._actions if "--out" in action.option_strings]
    for action in found:
        assert callable(action.type) and action.type("~/x") == home / "x"
    with_output = {"prepare", "tokenizer", "export", "import", "evaluate", "generate", "sweep"}
    assert found or name not in with_output | {"compare", "scaling"}


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
