# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``torchtitan-lr``: its table of commands, their help without torch, refusals in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import HEAVY, ROOT, Command
from tests.support.run_folders import write_run
from torchtitan_lr.commands.main import COMMANDS, main
from torchtitan_lr.config.paths import shipped_configs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHIPPED = "torchtitan_lr/data/assets/bpe4k"

HELP = f"""
import contextlib, io, json, resource, sys
from torchtitan_lr.commands.main import main
shown = []
for name in [None, *sys.argv[1:]]:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main(["--help"] if name is None else [name, "--help"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    shown.append([text.getvalue(), used.ru_utime + used.ru_stime])
heavy = [name for name in {[*HEAVY, "numpy", "scipy"]!r} if name in sys.modules]
print(json.dumps([shown, heavy]))
"""


def test_help_loads_no_torch_and_is_quick():
    command = [sys.executable, "-c", HELP, *COMMANDS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    ((listed, began), *each), heavy = json.loads(done.stdout)
    assert heavy == [] and began < 0.3  # CPU seconds, the interpreter's start included
    assert all(f"\n    {name}" in listed for name in COMMANDS)
    assert "Train the model of a TOML file" in listed
    for name, (text, ended) in zip(COMMANDS, each, strict=True):
        assert text.startswith("usage: ") and f"torchtitan-lr {name}" in text
        assert ended - began < 0.15, name
        began = ended


REFUSED = [
    ("estimat", "COMMAND: got 'estimat', expected one of train, "),
    ("estimate no_such.toml", "job.config_file: got 'no_such.toml'"),
    ("config show", "CONFIG: got 'nothing', expected a TOML file"),
    ("tokenizer --out=x --beams=4", "got '--beams=4', expected an option of"),
    ("tokenizer --out=x --vocab_size 200", "--vocab_size: got 200, expected at least 259"),
    (f"prepare --out x --tokenizer {SHIPPED}", "SOURCE: got ''"),
    (f"prepare --out x nowhere.txt --tokenizer {SHIPPED}", "SOURCE: got 'nowhere.txt'"),
    (f"prepare --out x cpython --tokenizer {SHIPPED} --tokens inf", "--tokens: got inf"),
    ("prepare --out x --verify", "--out: got "),
    ("generate RUN --prompt a --temperature 1e-30", "--temperature: got 1e-30"),
    ("generate RUN --prompt bytes-\udcff-that-are-no-UTF-8", "--prompt: got "),
    ("generate RUN --prompt a --device abacus", "--device: got 'abacus'"),
    ("generate RUN --prompt a --training.steps=4", "got '--training.steps=4'"),
    ("generate RUN --prompt LONG", "--prompt: got "),
    ("generate none --prompt a", "CHECKPOINT: got 'none', expected a complete checkpoint"),
    ("evaluate RUN --corpus local", "--path: got None"),
    ("evaluate RUN --corpus local --path blank/metrics.jsonl", "--path: got"),
    ("evaluate RUN --corpus python_stdlib --seq_len 65", "--seq_len: got 65, expected at most"),
    ("evaluate RUN --documents 2", "--documents: got 2, expected a --corpus beside it"),
    ("runs nothing", "PATH: got 'nothing', expected a folder that exists"),
    ("runs blank --plot=a.pdf", "--plot: got 'a.pdf'"),
    ("runs blank --plot=a.png", "--plot: got 'a.png', expected runs with"),
]


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), "cola")[0]


@pytest.mark.parametrize(("words", "line"), REFUSED)
def test_refusals_are_one_line(step, tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.chdir(tmp_path)
    Path("blank").mkdir()
    Path("blank/metrics.jsonl").touch()
    given = {"RUN": str(step), "LONG": "long " * 80}
    name, *rest = [given.get(word, word) for word in words.split()]
    assert Command(name).refusal(capsys, *rest).startswith(f"error: {line}")


def test_shipped_configurations_are_listed(capsys):
    assert main(["config", "list"]) == 0
    _, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert [row[0] for row in rows] == list(shipped_configs())
    debug = next(row for row in rows if row[0] == "debug_cola")
    assert (debug[1], debug[4], debug[5]) == ("llama_cola", "2", "150")


def test_a_reader_that_ends_early_causes_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "torchtitan_lr", "config", "list"]
    done = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")
