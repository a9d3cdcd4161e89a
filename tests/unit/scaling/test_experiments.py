# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs that commands start: their records, failures and stops; tests/integration has whole ones."""

import json
import os
import signal
import sys
import threading
import time

import pytest

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.scaling import experiments
from torchtitan_lr.scaling.experiments import (
    RunFailedError,
    check_run,
    launch,
    step_records,
)

LOSS = "loss_metrics/global_avg_loss"


def test_records_of_repeated_steps_count_once(tmp_path):
    records = [{"step": s, LOSS: v} for s, v in ((1, 9.0), (2, 8.0), (3, 7.0), (2, 8.5))]
    records.append({"step": 3, "validation_metrics/loss": 6.0})
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 4, "lo')  # cut off by a kill
    assert [(r["step"], r[LOSS]) for r in step_records(tmp_path)] == [(1, 9.0), (2, 8.5), (3, 7.0)]
    assert step_records(tmp_path / "nowhere") == []


POPEN = experiments.subprocess.Popen


def stand_in(monkeypatch, program):
    """Let a few lines of Python stand where the launcher's module stands."""
    started = []

    def popen(command, **options):
        assert command[1:4] == ["-m", "torchtitan_lr", "train"]
        started.append(POPEN([sys.executable, "-c", program, *command[4:]], **options))
        return started[-1]

    monkeypatch.setattr(experiments.subprocess, "Popen", popen)
    return started


def test_a_failure_is_the_launchers_last_line(monkeypatch, tmp_path):
    program = "import sys; print('error: rank 1 failed: x\\nmore', file=sys.stderr); sys.exit(1)"
    stand_in(monkeypatch, program)
    with pytest.raises(RunFailedError, match=r"^error: rank 1 failed: x$"):
        launch("a.toml", tmp_path, [])
    stand_in(monkeypatch, "import sys; sys.exit(3)")
    with pytest.raises(RunFailedError, match="ended with status 3"):
        launch("a.toml", tmp_path, [])


def test_arguments_and_environment(monkeypatch, tmp_path):
    program = (
        "import os, sys, json; json.dump([sys.argv[1:], os.environ['NGPU'], os.environ['X']],"
        f" open({str(tmp_path / 'seen')!r}, 'w'))"
    )
    stand_in(monkeypatch, program)
    launch("a.toml", tmp_path, ["--training.steps=3"], ranks=3, variables={"X": "y"})
    arguments, ranks, x = json.loads((tmp_path / "seen").read_text())
    assert arguments == [
        "--job.config_file=a.toml",
        f"--job.dump_folder={tmp_path}",
        "--training.steps=3",
    ]
    assert (ranks, x) == ("3", "y")


def is_in(function, thread):
    """Whether a thread runs a function, or what that called."""
    frame = sys._current_frames()[thread.ident]
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


def test_a_stop_is_passed_on_and_waited_for(monkeypatch, tmp_path):
    program = (
        "import os, signal, pathlib\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "read, write = os.pipe()\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(write, b'1'))\n"
        "(folder / 'ready').open('w').close()\n"
        "os.read(read, 1)\n"
        "(folder / 'saved').touch()"
    )
    os.mkfifo(tmp_path / "ready")
    started = stand_in(monkeypatch, program)
    main = threading.main_thread()

    def interrupt():
        (tmp_path / "ready").open().close()  # opens when the other side does
        while not is_in(POPEN.wait, main):
            time.sleep(0.001)
        # To the main thread, as the kernel would: that one waits.
        signal.pthread_kill(main.ident, signal.SIGINT)

    # Tests of other commands leave their own handlers behind.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            launch("a.toml", tmp_path, [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert started[0].returncode == 0  # known: it was waited for
    assert (tmp_path / "saved").exists()


def test_runs_are_checked_for_their_ranks(monkeypatch):
    monkeypatch.setenv("NGPU", "4")
    config = "--job.config_file=train_configs/debug_cola.toml"
    assert check_run([config]).model.name == "llama_cola"
    with pytest.raises(ConfigError, match="tensor_parallel_degree"):
        check_run([config], ranks=3)
    with pytest.raises(ConfigError, match=r"low_rank\.depth"):
        check_run([config, "--low_rank.depth=3"])
    for variable, value in (("NNODES", "2"), ("COMM_MODE", "fake_backend")):
        with monkeypatch.context() as patch, pytest.raises(ConfigError, match=variable):
            patch.setenv(variable, value)
            patch.setenv("RDZV_ENDPOINT", "host:1")
            check_run([config])


def test_report_from_rank_does_nothing_outside_a_rank():
    experiments.report_from_rank(lambda _: pytest.fail("this is no rank"), [])
