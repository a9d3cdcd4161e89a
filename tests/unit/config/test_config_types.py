# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math
from dataclasses import dataclass, field
from typing import Literal

import pytest

from torchtitan_lr.config.build import config_class
from torchtitan_lr.config.parse import apply_overrides, check_toml, load_toml, split_arguments
from torchtitan_lr.errors import ConfigError


@dataclass
class Loader:
    num_workers: int = 0
    pin_memory: bool = False
    factor: int | None = None


@dataclass
class Section:
    steps: int = 100
    lr: float = 0.1
    norm: float | int = 1.0
    enable: bool = False
    no_color: bool = False
    name: str = "a"
    path: str | None = None
    mode: Literal["sync", "async"] = "sync"
    ratio: float | None = None
    tags: list[str] = field(default_factory=list)
    parts: list[list[str]] | None = None
    fqns: list[str] | str = field(default_factory=list)
    loader: Loader = field(default_factory=Loader)


@dataclass
class Config:
    train: Section = field(default_factory=Section)
    model: Loader = field(default_factory=Loader)


def from_cli(*argv):
    return apply_overrides({}, split_arguments(list(argv)), Config)


def message(call, *args):
    with pytest.raises(ConfigError) as info:
        call(*args)
    text = str(info.value)
    assert "\n" not in text
    return text


GOOD_TOML = [
    ("lr", 1, 1.0),
    ("enable", True, True),
    ("ratio", 0, 0.0),
    ("tags", ["a", "b"], ["a", "b"]),
    ("parts", [["a"], ["b", "c"]], [["a"], ["b", "c"]]),
    ("fqns", ["a"], ["a"]),
    ("loader", {"num_workers": 2, "pin_memory": True}, {"num_workers": 2, "pin_memory": True}),
]


@pytest.mark.parametrize(("name", "value", "expected"), GOOD_TOML)
def test_toml_values_that_fit(name, value, expected):
    checked = check_toml({"train": {name: value}}, Config)["train"][name]
    assert checked == expected
    assert type(checked) is type(expected)


BAD_TOML = [
    ("steps", "ten", "an integer such as 100"),
    ("lr", "1e-3", "a number such as 0.1"),
    ("mode", "later", "one of 'sync', 'async'"),
    ("parts", ["a"], "a list of lists of strings"),
    ("loader", 3, "a table: [train.loader]"),
]


@pytest.mark.parametrize(("name", "value", "want"), BAD_TOML)
def test_toml_values_that_do_not_fit(name, value, want):
    text = message(check_toml, {"train": {name: value}}, Config)
    assert text.startswith(f"train.{name}: got {value!r}, expected ")
    assert want in text


@pytest.mark.parametrize(
    ("values", "key", "want"),
    [
        ({"train": {"stepz": 1}}, "train.stepz", "did you mean train.steps?"),
        ({"trains": {"steps": 1}}, "trains", "did you mean [train]?"),
        ({"steps": 1}, "steps", "did you mean train.steps?"),
        ({"model": {"steps": 1}}, "model.steps", "did you mean train.steps?"),
    ],
)
def test_unknown_keys_name_the_closest(values, key, want):
    text = message(check_toml, values, Config)
    assert text.startswith(f"{key}: got ")
    assert want in text


def test_a_section_is_preferred_to_a_key_of_it():
    text = message(check_toml, {"optimizers": {"lr": 1.0}}, config_class())
    assert "did you mean [optimizer]?" in text


GOOD_CLI = [
    (["--train.steps=5"], {"steps": 5}),
    (["--train.lr", "1e-3"], {"lr": 1e-3}),
    (["--train.norm=inf"], {"norm": math.inf}),
    (["--train.enable"], {"enable": True}),
    (["--train.no_enable"], {"enable": False}),
    (["--train.no_no_color"], {"no_color": False}),
    (["--train.name=--odd"], {"name": "--odd"}),
    (["--train.path=None"], {"path": None}),
    (["--train.mode=async"], {"mode": "async"}),
    (["--train.tags=a, b"], {"tags": ["a", "b"]}),
    (["--train.fqns=a,b"], {"fqns": ["a", "b"]}),
    (["--train.loader.num-workers=3"], {"loader": {"num_workers": 3}}),
]


@pytest.mark.parametrize(("argv", "expected"), GOOD_CLI)
def test_command_lines_that_fit(argv, expected):
    assert from_cli(*argv) == {"train": expected}


BAD_CLI = [
    (["--train.steps=ten"], "train.steps", "'ten'", "an integer such as 100"),
    (["--train.no_enable=true"], "train.no_enable", "'true'", "no value"),
    (["--train.parts=a"], "train.parts", "'a'", "in the TOML file"),
    (["--trian.steps=3"], "trian.steps", "'3'", "did you mean train.steps?"),
    (["train.steps=3"], "command line", "'train.steps=3'", "--training.steps=100"),
    (["--train.steps", "3", "4"], "command line", "'4'", "--section.key=value"),
]


@pytest.mark.parametrize(("argv", "key", "got", "want"), BAD_CLI)
def test_command_lines_that_do_not_fit(argv, key, got, want):
    text = message(from_cli, *argv)
    assert text.startswith(f"{key}: got {got}, expected ")
    assert want in text


def test_toml_syntax_error_names_file_and_line(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[train]\nsteps = \n")
    text = message(load_toml, str(path))
    assert text.startswith("job.config_file: got ")
    assert "bad.toml:2'" in text
    assert "valid TOML" in text


@pytest.mark.parametrize("name", ["none.toml", "."])
def test_unreadable_file(tmp_path, name):
    text = message(load_toml, str(tmp_path / name))
    assert "a TOML file such as train_configs/debug_cola.toml" in text
