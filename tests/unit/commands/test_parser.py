# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import argparse
import ast
import json
import os
import subprocess
import sys

import pytest

from tests.scripts import ROOT
from tests.unit.test_imports import COMMANDS
from torchtitan_lr.commands.parser import (
    FIRST_RANK_SECONDS,
    OneLineParser,
    in_one_line,
    overrides_of,
)
from torchtitan_lr.console.tables import markdown_table, text_table
from torchtitan_lr.errors import ConfigError, RunFailedError

# Runs before anything is installed: it takes names of extras and has no option.
NO_OPTIONS = {"scripts/check_env.py"}

ASK_EVERY_COMMAND = """
import contextlib, io, json, runpy, sys
found = {}
for script in sys.argv[1:]:
    for argument in ("--help", "--no-such-option"):
        out, err, status = io.StringIO(), io.StringIO(), None
        sys.argv = [script, argument]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            status = end.code
        found[f"{script} {argument}"] = [status, out.getvalue(), err.getvalue()]
print(json.dumps(found))
"""


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
    assert told == "error: --steps: got 3, expected at least 4\n"
    assert "--share: got nan" in refused(capsys, parser.check_at_least, options, share=0)


def test_files(capsys, tmp_path):
    parser = OneLineParser(prog="tool")
    (tmp_path / "a.toml").write_text("")
    parser.check_toml(str(tmp_path / "a.toml"))
    told = refused(capsys, parser.check_toml, "no.toml", "CONFIG")
    assert told == "error: CONFIG: got 'no.toml', expected a TOML file\n"
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


def test_the_help_shows_defaults(capsys):
    parser = OneLineParser(prog="tool", description="First line.\n\n    second line")
    parser.add_argument("--steps", type=int, default=0, help="how many")
    parser.add_argument("--share", default="50%", help="of all")
    parser.add_argument("--kinds", nargs="+", default=["a", "b"])
    parser.add_argument("--json", action="store_true", help="print data")
    parser.add_argument("--text", help="a file")
    shown = parser.format_help()
    for text in ("how many (default: 0)", "of all (default: 50%)", "(default: a b)"):
        assert text in shown
    assert shown.count("default: ") == 3
    assert "\n    second line\n" in shown


def first(default=None):
    parser = OneLineParser(prog="tool")
    parser.add_first("config", "--config", default=default, help="a TOML file")
    parser.add_argument("--steps", type=int, default=1)
    return parser


@pytest.mark.parametrize("arguments", [["a"], ["--config", "a"], ["--config=a", "--steps=2"]])
def test_the_first_argument_has_an_older_spelling(arguments):
    for default in (None, "b"):
        options = first(default).parse_args(arguments)
        assert options.config == "a" and not hasattr(options, "old_config")
    assert "--config" not in first().format_help()


def test_the_first_argument_may_be_left_out_where_it_has_a_default(capsys):
    assert first("b").parse_args(["--steps=2"]).config == "b"
    told = refused(capsys, first().parse_args, [])
    assert told == "error: CONFIG: got nothing, expected it as the first argument\n"


def test_overrides_stand_among_the_arguments(capsys):
    options = first().parse_with_overrides(["a", "--training.steps=3", "--steps=2"])
    assert (options.config, options.steps) == ("a", 2)
    assert options.overrides == ["--training.steps=3"]
    refused(capsys, first().parse_with_overrides, ["a", "--stop"])


def test_refusals_and_failed_runs_become_a_status(capsys):
    def main(argv):
        raise {"refused": ConfigError("a.b", 3, "4"), "failed": RunFailedError("error: x")}[argv]

    assert in_one_line(main)("refused") == 2
    assert capsys.readouterr().err == "error: a.b: got 3, expected 4\n"
    assert in_one_line(main)("failed") == 1
    assert capsys.readouterr().err == "error: x\n"


@pytest.fixture(scope="module")
def asked():
    command = [sys.executable, "-c", ASK_EVERY_COMMAND, *COMMANDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def defaults(path):
    """How many arguments of a command have a default that says something."""
    nothing = ("", None, False)
    number = 0
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith("add_"):
            values = [k.value for k in node.keywords if k.arg == "default"]
            number += any(not isinstance(v, ast.List) or v.elts for v in values) and not any(
                isinstance(v, ast.Constant) and v.value in nothing and v.value != 0 for v in values
            )
    return number


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_its_defaults(asked, command):
    status, out, err = asked[f"{command} --help"]
    assert (status, err) == (0, "")
    assert out.startswith("usage: ")
    assert " ".join(out.split()).count("default") >= defaults(command)


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - NO_OPTIONS))
def test_every_command_refuses_in_one_line(asked, command):
    status, out, err = asked[f"{command} --no-such-option"]
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1


def imports_tests(path):
    """Whether a file imports from the tests, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        if any(name.partition(".")[0] == "tests" for name in names):
            return True
    return False


def test_nothing_imports_from_the_tests():
    files = [*ROOT.glob("scripts/**/*.py"), *ROOT.glob("torchtitan_lr/**/*.py")]
    assert len(files) > 100
    assert not [path for path in files if imports_tests(path)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import tests.scripts", True),
        ("from tests import scripts", True),
        ("def f():\n    from tests.reference.tsr_adam import step", True),
        ("from torchtitan_lr import tests", False),
        ("import testsuite", False),
    ],
)
def test_an_import_from_the_tests_would_be_noticed(text, found, tmp_path):
    (tmp_path / "a.py").write_text(text)
    assert imports_tests(tmp_path / "a.py") is found


def test_only_the_first_rank_reports_what_all_ranks_found(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)

    @in_one_line
    def fails(argv=None):
        raise ConfigError("key", 1, "2")

    for rank, run in (("0", "id"), ("1", "id"), ("1", None)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if run is not None:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
        assert fails([]) == 2 and "error: key: got 1" in capsys.readouterr().err
    assert waited == [FIRST_RANK_SECONDS]  # rank 1 of torchrun, which rank 0's end kills there


@pytest.mark.parametrize("words", [["completion", "bash"], ["config", "list"]])
def test_a_reader_that_ends_early_causes_no_traceback(words):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "torchtitan_lr.commands.main", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
