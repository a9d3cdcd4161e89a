# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A program from the fork server against the same one truly started: no difference must be seen."""

import json
import os
import re
import signal
import sys

import pytest

from tests.fork_server import AVAILABLE
from tests.integration import runs

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="the fork server needs Linux")

# What a process can find out about itself, and about a child that it starts.
PROGRAM = """
import atexit, json, os, re, signal, subprocess, sys, threading
from pathlib import Path

def signals(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(re.search(key + r":\\s*(\\w+)", status)[1], 16) for key in ("SigIgn", "SigCgt")]
    # Without the C library's own signals.
    return [[n for n in signal.valid_signals() if mask >> (n - 1) & 1] for mask in masks]

def is_open(number):  # the folder's own descriptor is closed again
    return Path(f"/proc/self/fd/{number}").is_symlink()

handlers = {str(n): str(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()}
seen = {
    "name": __name__, "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path,
    "environment": dict(os.environ), "signals": signals("self"), "handlers": handlers,
    "files": sorted(filter(is_open, list(map(int, os.listdir("/proc/self/fd"))))),
    "stdin": sys.stdin.read(), "encodings": [sys.stdout.encoding, sys.stderr.encoding],
    "lines": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    "threads": [thread.name for thread in threading.enumerate()],
    "leads": os.getpid() == os.getsid(0),
}
if len(sys.argv) > 2:
    seen["folder"] = os.environ.pop("FOLDER")
    signal.signal(signal.SIGTERM, lambda *_: None)  # a child does not inherit it
    read, write = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-u", *sys.argv[2:]], env={**os.environ, "X": "y"}, cwd="/",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, pass_fds=[write],
        preexec_fn=lambda: os.umask(0o77),
    )
    mine = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
    assert mine == [str(child.pid)]
    out, err = child.communicate()
    found = json.loads(out)
    found["files"] = [number - write for number in found["files"] if number > 2]
    seen["child"] = [found, err.decode(), child.returncode]
    Path(seen["folder"]).mkdir(0o777)
    atexit.register(os.rmdir, seen["folder"])
else:
    seen["umask"] = os.umask(0)
print(json.dumps(seen), end="")
sys.exit(sys.argv[1] if sys.argv[1].isalpha() else int(sys.argv[1]))
"""
HOW = pytest.mark.parametrize("truly", [True, False], ids=["true", "forked"])


def test_a_program_sees_no_difference(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, script, "7", script, "farewell"]
    found = []
    for truly in (True, False):
        done = runs.run(
            command,
            cwd=tmp_path,
            truly=truly,
            ignored=[signal.SIGHUP],
            FOLDER=str(tmp_path / "folder"),
        )
        assert done.status == 7, done.everything
        assert not (tmp_path / "folder").exists()
        found.append(json.loads(done.out) | {"err": done.err})
    different = {key: [seen[key] for seen in found] for key in found[0]}
    different = {key: both for key, both in different.items() if both[0] != both[1]}
    assert not different
    # The control: these are no empty answers.
    child, err, status = found[0]["child"]
    assert (status, err) == (1, "farewell\n") and child["leads"] and child["umask"] == 0o77
    assert child["argv"] == [str(script), "farewell"] and child["environment"]["X"] == "y"
    assert child["files"] == [0]  # the one that it was to inherit, next to its own three


@HOW
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_signal_ends_a_program(tmp_path, truly, number):
    (tmp_path / "waits.py").write_text(
        "import signal, sys, pathlib\npathlib.Path(sys.argv[1]).write_text('ready')\nsignal.pause()"
    )
    ready = tmp_path / "ready"
    process = runs.Process([sys.executable, tmp_path / "waits.py", ready], truly=truly)
    process.wait_until(lambda: ready.is_file() and ready.read_text())
    process.send(number)
    assert process.finish().status == -number


@HOW
def test_an_error_ends_a_program(tmp_path, truly):
    (tmp_path / "module_that_fails.py").write_text("print('before')\nraise KeyError('no such')\n")
    command = [sys.executable, "-m", "module_that_fails"]
    done = runs.run(command, truly=truly, PYTHONPATH=str(tmp_path))
    assert (done.status, done.out) == (1, "before\n")
    assert done.err.startswith("Traceback") and done.err.endswith("\nKeyError: 'no such'\n")


def test_a_whole_run_is_the_same_to_the_last_digit(finished, tmp_path):
    """Against the one of `run_llama_train.sh`: 4 ranks, another folder, nothing shown."""
    text = finished.config.read_text().replace(str(finished.folder), str(tmp_path / "dump"))
    config = tmp_path / "job.toml"
    config.write_text(re.sub(r"enable_(tensorboard|wandb) = true", r"enable_\1 = false", text))
    process = runs.launch(config, "--training.steps=6", ranks=4)
    torchrun = process.wait_until(lambda: runs.child_pids(process.pid))
    assert len(torchrun) == 1 and torchrun[0] != os.getsid(process.pid)
    # The child makes its session after the fork, so it may have none of its own yet.
    process.wait_until(lambda: os.getsid(torchrun[0]) == torchrun[0])
    done = process.finish()
    assert done.status == 0, done.everything
    forked, true = runs.history(tmp_path / "dump"), runs.history(finished.folder)
    assert runs.exact(forked) == runs.exact(true) and len(true) > 6
    assert forked != true  # the control: their times differ
    names = ["checkpoint", "curve.png", "job_config.json", "logs", "metrics.jsonl", "summary.json"]
    for folder in (tmp_path / "dump", finished.folder):
        assert {path.name for path in folder.iterdir()} >= set(names)
