# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import argparse

import pytest

from torchtitan_lr.tools.cli import OneLineParser, markdown_table, overrides_of, text_table


def refused(capsys, call, *arguments, **named):
    with pytest.raises(SystemExit) as info:
        call(*arguments, **named)
    assert info.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_minima(capsys):
    parser = OneLineParser(prog="tool")
    options = argparse.Namespace(steps=3, share=float("nan"))
    parser.check_at_least(options, steps=3)
    told = refused(capsys, parser.check_at_least, options, steps=4)
    assert told == "tool: --steps: got 3, expected at least 4\n"
    assert "--share: got nan" in refused(capsys, parser.check_at_least, options, share=0)


def test_files(capsys, tmp_path):
    parser = OneLineParser(prog="tool")
    (tmp_path / "a.toml").write_text("")
    parser.check_toml(str(tmp_path / "a.toml"))
    told = refused(capsys, parser.check_toml, "no.toml", "CONFIG")
    assert told == "tool: CONFIG: got 'no.toml', expected a TOML file\n"
    refused(capsys, parser.check_toml, str(tmp_path))


@pytest.mark.parametrize("argument", ["--beams=4", "more", "-x", "--stepz"])
def test_unknown_arguments(capsys, argument):
    parser = OneLineParser(prog="tool")
    parser.check_overrides(["--training.steps=3", "--metrics.no_enable_wandb"])
    assert repr(argument) in refused(capsys, parser.check_overrides, [argument])


def test_tables():
    rows = [["a", "1"], ["bbb", "22"]]
    assert text_table(["name", "n"], rows) == "name   n\na      1\nbbb   22"
    assert markdown_table(["name", "n"], rows).splitlines()[1:3] == ["| --- | --- |", "| a | 1 |"]
    assert overrides_of(["training.steps=3"]) == ["--training.steps=3"]
