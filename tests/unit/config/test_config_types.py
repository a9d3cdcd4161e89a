# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math
from dataclasses import dataclass, field
from typing import Literal

import pytest

from torchtitan_lr.config.parse import check_toml, split_arguments, typed_overrides
from torchtitan_lr.errors import ConfigError


@dataclass
class Loader:
    num_workers: int = 0
    pin_memory: bool = False


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
    tags: list[str] = field(default_factory=list)
    parts: list[list[str]] | None = None
    loader: Loader = field(default_factory=Loader)


@dataclass
class Config:
    train: Section = field(default_factory=Section)
    model: Loader = field(default_factory=Loader)


def from_cli(*argv):
    return typed_overrides(split_arguments(list(argv)), Config)


def from_toml(values):
    return check_toml(values, Config)


GOOD_TOML = {
    "lr": (1, 1.0),
    "enable": (True, True),
    "tags": (["a", "b"], ["a", "b"]),
    "parts": ([["a"], ["b", "c"]], [["a"], ["b", "c"]]),
    "loader": ({"num_workers": 2, "pin_memory": True}, {"num_workers": 2, "pin_memory": True}),
}


def test_toml_values_that_fit():
    checked = from_toml({"train": {name: value for name, (value, _) in GOOD_TOML.items()}})
    for name, (_, expected) in GOOD_TOML.items():
        found = checked["train"][name]
        assert (found, type(found)) == (expected, type(expected)), name


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
    (["--train.loader.num-workers=3"], {"loader": {"num_workers": 3}}),
]


@pytest.mark.parametrize(("argv", "expected"), GOOD_CLI)
def test_command_lines_that_fit(argv, expected):
    assert from_cli(*argv) == {"train": expected}


REFUSED = [
    # a table or a command line, how the line begins, what it wants
    ({"train": {"steps": "ten"}}, "train.steps: got 'ten'", "an integer such as 100"),
    ({"train": {"steps": True}}, "train.steps: got True", "an integer"),
    ({"train": {"lr": "1e-3"}}, "train.lr: got '1e-3'", "a number such as 0.1"),
    ({"train": {"mode": "later"}}, "train.mode: got 'later'", "one of 'sync', 'async'"),
    ({"train": {"parts": ["a"]}}, "train.parts: got ['a']", "a list of lists of strings"),
    ({"train": {"loader": 3}}, "train.loader: got 3", "a table: [train.loader]"),
    ({"train": {"stepz": 1}}, "train.stepz: got 1", "did you mean train.steps?"),
    ({"trains": {"steps": 1}}, "trains: got 'a table'", "did you mean [train]?"),
    ({"steps": 1}, "steps: got 1", "did you mean train.steps?"),
    ({"model": {"steps": 1}}, "model.steps: got 1", "did you mean train.steps?"),
    (["--train.steps=ten"], "train.steps: got 'ten'", "an integer such as 100"),
    (["--train.no_enable=true"], "train.no_enable: got 'true'", "no value"),
    (["--train.parts=a"], "train.parts: got 'a'", "in the TOML file"),
    (["--trian.steps=3"], "trian.steps: got '3'", "did you mean train.steps?"),
    (["train.steps=3"], "command line: got 'train.steps=3'", "--training.steps=100"),
    (["--train.steps", "3", "4"], "command line: got '4'", "--section.key=value"),
]


@pytest.mark.parametrize(("given", "line", "want"), REFUSED)
def test_refusals_name_key_value_and_what_works(given, line, want):
    with pytest.raises(ConfigError) as info:
        from_toml(given) if isinstance(given, dict) else from_cli(*given)
    text = str(info.value)
    assert text.startswith(f"{line}, expected ") and want in text and "\n" not in text
