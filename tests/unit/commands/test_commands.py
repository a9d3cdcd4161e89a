# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``torchtitan-lr``: one parser over all programs, without torch; completion in real shells."""

import json
import shutil
import subprocess
import sys

import pytest
from torchtitan_lr.commands.completion import script, whole_parser

from tests.scripts import ROOT, load_script
from tests.unit.test_imports import HEAVY, python
from torchtitan_lr.commands import commands
from torchtitan_lr.commands import parser as cli
from torchtitan_lr.commands.main import known, main
from torchtitan_lr.commands.parser import declared_parser
from torchtitan_lr.config.shipped import shipped_configs

NAMES = ("train", "estimate", "compare", "sweep", "export", "generate", "evaluate", "config")
NAMES += ("measure-comm", "tokenizer", "completion")
WITH_OVERRIDES = {"train", "estimate", "compare", "sweep", "measure-comm", "config"}
WITH_OVERRIDES |= {"seed-checkpoint"}
WITHOUT = {"export", "tokenizer", "activation-rank"}

ASK = f"""
import contextlib, io, json, sys, time
from torchtitan_lr.commands.main import known, main
found, seconds = {{}}, None
for arguments in [["--help"], ["--version"], *([name, "--help"] for name in known())]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    if seconds is None:
        seconds = time.process_time()
    found[arguments[0]] = [status or 0, said.getvalue()]
heavy = [name for name in {HEAVY!r} if name in sys.modules]
print(json.dumps([found, heavy, seconds]))
"""


@pytest.fixture(scope="module")
def asked():
    (found, heavy, seconds), said = python(ASK)
    assert said == ""
    return found, heavy, seconds


@pytest.fixture
def console(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torchtitan-lr"])
    monkeypatch.setattr(cli, "SHOWN", cli.ShownNames())


def test_help_needs_no_torch_and_no_second(asked):
    found, heavy, seconds = asked
    assert heavy == []
    assert seconds < 1  # of the CPU, the interpreter's start included
    assert found["--help"][0] == 0
    for name in (*NAMES, *known()):
        assert f"\n    {name}" in found["--help"][1]


def test_each_command_shows_itself_and_no_script(asked):
    found, _, _ = asked
    for name in known():
        status, text = found[name]
        assert status == 0 and text.startswith(f"usage: torchtitan-lr {name} "), name
        assert "python scripts/" not in text
    assert "    torchtitan-lr estimate train_configs/boost_13b.toml\n" in found["estimate"][1]


def test_the_version(asked):
    text = asked[0]["--version"][1]
    assert text.startswith("torchtitan_lr ") and ", torch 2." in text


def test_every_program_is_a_command():
    own = {"check_env", "check_smoke"}
    files = {path.stem for path in (ROOT / "scripts").glob("*.py")} - own
    assert {command.path.stem for command in known().values()} == files
    assert set(NAMES) - {"train", "completion"} <= set(known())


def test_a_new_program_is_a_new_command(monkeypatch, capsys, console, tmp_path):
    """Under its name, or the one of `RENAMED`; what has no program is no command."""
    monkeypatch.setattr(commands, "shipped_folder", {"scripts": tmp_path}.__getitem__)
    for name in ("import_hf", "new_one", "check_env", "compare"):
        (tmp_path / f"{name}.py").write_text(f'"""Do {name}."""\nprint("ran", __name__)\n')
    assert list(known()) == ["compare", "import", "new-one"]
    assert commands.summaries()["new-one"] == "Do new_one"
    assert main(["new-one"]) == 0
    assert capsys.readouterr().out == "ran __main__\n"
    assert main(["estimate"]) == 2
    said = capsys.readouterr().err
    names = "train, compare, import, new-one, completion"
    assert said == f"error: COMMAND: got 'estimate', expected one of {names}\n"


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["estimat"], "COMMAND: got 'estimat', expected one of "),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["completion", "sh"], "argument SHELL: invalid choice: 'sh'"),
        (["config", "show", "cola_6m"], "CONFIG: got 'cola_6m', expected a TOML file: did you "),
        (["config", "list", "debug_cola"], "list: got 'debug_cola', expected nothing"),
        (["config", "show"], "CONFIG: got nothing, expected a TOML file or a name"),
    ],
)
def test_refusals_are_one_line(arguments, refused, capsys, console):
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr().err
    assert status == 2 and said.startswith(f"error: {refused}") and said.count("\n") == 1


def test_a_command_is_its_script(capsys, console):
    with pytest.raises(SystemExit) as info:
        main(["config", "list", "--json"])
    assert info.value.code == 0
    by_command = capsys.readouterr().out
    assert load_script("config").main(["list", "--json"]) == 0
    assert capsys.readouterr().out == by_command
    rows = json.loads(by_command)
    assert [row["name"] for row in rows] == list(shipped_configs())
    (row,) = (row for row in rows if row["name"] == "debug_tsr")
    assert (row["model"], row["optimizer"], row["ranks"]) == ("llama_full", "TSRAdam", 2)


def test_a_parser_is_declared_without_a_run():
    ran = []

    def program(argv=None):
        parser = cli.OneLineParser(prog="tool")
        parser.add_argument("--steps")
        ran.append(parser.parse_args(argv))
        return 0

    assert "--steps" in declared_parser(program).format_help() and ran == []
    assert program(["--steps=3"]) == 0 and ran[0].steps == "3"
    with pytest.raises(ValueError, match="has no OneLineParser"):
        declared_parser(lambda argv: 0)


@pytest.fixture(scope="module")
def whole():
    parser = whole_parser()
    (subparsers,) = (action.choices for action in parser._actions if action.choices)
    return subparsers


def test_the_whole_parser_has_all_options(whole):
    """Those of each program's own help, and the keys of the configuration where they are taken."""
    assert set(whole) == {"train", "completion", *known()}
    for name, command in known().items():
        own = {option for action in command.parser()._actions for option in action.option_strings}
        taken = {option for action in whole[name]._actions for option in action.option_strings}
        keys = {option for option in taken if "." in option}
        assert own <= taken and taken - keys == own
        assert (name in WITH_OVERRIDES) <= bool(keys) <= (name not in WITHOUT), name
    train = whole["train"].format_help()
    for key in ("--training.steps ", "--caat.lanes ", "--checkpoint.no_enable"):
        assert key in train


def completed(tmp_path, *words):
    """What bash offers for the last word."""
    code = tmp_path / "complete.bash"
    if not code.exists():
        code.write_text(script("bash"))
    line = " ".join(f"'{word}'" for word in words)
    text = f"""
        source {code}
        COMP_WORDS=(torchtitan-lr {line}); COMP_CWORD={len(words)}
        _shtab_torchtitan_lr; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_bash_completes(tmp_path):
    (tmp_path / "debug_own.toml").write_text("")
    assert completed(tmp_path, "meas") == ["measure-comm"]
    assert completed(tmp_path, "train", "debug_c") == ["debug_caat", "debug_cola"]
    assert "debug_own.toml" in completed(tmp_path, "estimate", "debug_")
    assert completed(tmp_path, "train", "debug_cola", "--training.max_n") == ["--training.max_norm"]
    assert completed(tmp_path, "generate", "--cache", "") == ["full", "latent"]
    assert completed(tmp_path, "config", "s") == ["show"]
    # The control: where nothing fits, nothing is offered.
    assert completed(tmp_path, "nosuch") == completed(tmp_path, "train", "nosuch") == []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_its_script(tmp_path):
    (tmp_path / "_torchtitan-lr").write_text(script("zsh"))
    assert subprocess.run(["zsh", "-n", tmp_path / "_torchtitan-lr"]).returncode == 0
    assert "debug_cola" in (tmp_path / "_torchtitan-lr").read_text()


def test_two_words_are_one_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["torchtitan-lr"])
    with pytest.raises(SystemExit) as end:
        main(["data", "stats", "--help"])
    assert end.value.code == 0 and "usage: torchtitan-lr data-stats" in capsys.readouterr().out
    assert main(["data", "stat"]) == 2
    assert "COMMAND: got 'data'" in capsys.readouterr().err
