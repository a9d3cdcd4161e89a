# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``torchtitan-lr``: its table of commands, their help without torch, refusals in one line."""

import json
import os
import subprocess
import sys

import pytest

from tests.commands import HEAVY, ROOT
from torchtitan_lr.commands.main import COMMANDS, main
from torchtitan_lr.config.paths import shipped_configs

HELP = f"""
import contextlib, io, json, resource, sys
from torchtitan_lr.commands.main import main
shown = io.StringIO()
with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
    main(sys.argv[1:])
heavy = [name for name in {[*HEAVY, "numpy", "scipy"]!r} if name in sys.modules]
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([shown.getvalue(), heavy, used.ru_utime + used.ru_stime]))
"""


def ask(*arguments):
    command = [sys.executable, "-c", HELP, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_loads_no_torch_and_is_quick(name):
    text, heavy, seconds = ask(name, "--help")
    assert text.startswith("usage: ") and f"torchtitan-lr {name}" in text
    assert heavy == []
    assert seconds < 0.3  # CPU seconds, the interpreter's start included


def test_help_lists_the_commands_with_their_summaries():
    text, heavy, seconds = ask("--help")
    assert heavy == [] and seconds < 0.3
    for name in COMMANDS:
        assert f"\n    {name}" in text
    assert "Train the model of a TOML file" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimat"], "error: COMMAND: got 'estimat', expected one of train, "),
        (["tokenizer", "--out=x", "--beams=4"], "error: got '--beams=4', expected an option of"),
        (["estimate", "no_such.toml"], "error: CONFIG: got 'no_such.toml'"),
        (["config", "show"], "error: CONFIG: got 'nothing', expected a TOML file"),
    ],
)
def test_refusals_are_one_line(arguments, message):
    command = [sys.executable, "-m", "torchtitan_lr", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1


def test_shipped_configurations_are_listed(capsys):
    assert main(["config", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(shipped_configs())
    debug = next(row for row in rows if row["name"] == "debug_cola")
    assert (debug["model"], debug["ranks"], debug["steps"]) == ("llama_cola", 2, 150)


def test_a_reader_that_ends_early_causes_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "torchtitan_lr", "config", "list"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
