# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the launcher refuses, and what it would start; its processes are in tests/integration."""

import os
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from tests.commands import ROOT
from torchtitan_lr.checkpoints.record import Record
from torchtitan_lr.compat.elastic import Failure
from torchtitan_lr.launch import launcher as launch
from torchtitan_lr.launch.placement import Environment, read_environment
from torchtitan_lr.launch.run_folder import locked

REFUSED = [
    ({"NGPU": "many"}, "", "NGPU: got 'many', expected a number from 1 to 1,024"),
    ({"TORCHTITAN_LR_GPUS": "all"}, "", "TORCHTITAN_LR_GPUS: got 'all', expected a number from 0"),
    ({"LOG_RANK": "4"}, "", "LOG_RANK: got '4', expected ranks from 0 to 3 such as 0,1"),
    ({"NNODES": "2"}, "", "RDZV_ENDPOINT: got '', expected host:port of one of the 2 machines"),
    ({"NNODES": "0:2"}, "", "NNODES: got '0', expected a number from 1 to 100,000"),
    ({"NNODES": "3:2"}, "", "NNODES: got '3:2', expected a range such as 2:3"),
    (
        {"NNODES": "2:3", "RDZV_ENDPOINT": "host:1"},
        "",
        "MAX_RESTARTS: got 0, expected 1 or more with NNODES=2:3",
    ),
    ({}, "--training.steps=ten", "training.steps: got 'ten', expected an integer such as 10000"),
    ({}, "debug_cole", "job.config_file: got 'debug_cole', expected a TOML file such as "),
    ({}, "--parallelism.data_parallel_shard_degree=3", "parallelism.data_parallel_shard_degree: "),
    ({}, "training.steps=3", "command line: got 'training.steps=3', expected --section.key=value"),
]


@pytest.mark.parametrize(("values", "argument", "expected"), REFUSED)
def test_a_refusal_is_one_line(variables, capsys, tmp_path, values, argument, expected):
    for name, value in values.items():
        variables.setenv(name, value)
    variables.chdir(ROOT)
    arguments = [argument, f"--job.dump_folder={tmp_path}/new"]
    assert launch.main([text for text in arguments if text]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {expected}") and captured.err.count("\n") == 1
    assert ("did you mean debug_cola" in captured.err) == (argument == "debug_cole")
    assert not (tmp_path / "new").exists()


def test_a_start_that_is_refused_names_the_job_in_its_folder(variables, capsys, tmp_path):
    step = tmp_path / "checkpoint/step-9"
    step.mkdir(parents=True)
    Record({key: {} for key in ("model", "train_state", "optimizer", "dataloader")}).write(step)
    arguments = [f"{ROOT}/train_configs/debug_cola.toml", f"--job.dump_folder={tmp_path}"]
    arguments += ["--training.steps=6"]
    assert launch.main(arguments) == 2
    assert "training.steps: got 6, expected at least 9, the step of " in capsys.readouterr().err
    with locked(str(tmp_path)):
        assert launch.main(arguments) == 2
    assert f"process {os.getpid()} on " in capsys.readouterr().err


def test_environment(variables):
    default = Environment(4, 1, "0", "", ranks_given=False)
    assert read_environment() == default
    variables.setenv("NGPU", "")
    assert read_environment() == default
    variables.setenv("NGPU", "8")
    variables.setenv("LOG_RANK", "0, 7")
    variables.setenv("RDZV_ENDPOINT", "host:1234")
    variables.setenv("MAX_RESTARTS", "3")
    for text, least, most in (("2:4", 2, 4), ("3:3", None, 3), ("2", None, 2)):
        variables.setenv("NNODES", text)
        found = read_environment()
        assert (found.min_nodes, found.nodes) == (least, most)
    assert found == Environment(8, 2, "0, 7", "", max_restarts=3, endpoint="host:1234")
    assert (found.world_size, found.shown()) == (16, [0, 7])
    variables.setenv("COMM_MODE", "fake_backend")
    assert read_environment() == Environment(16, 1, "0, 7", "fake_backend")


def test_how_to_go_on(tmp_path):
    checkpoint = SimpleNamespace(folder="checkpoint", enable=True)
    config = SimpleNamespace(checkpoint=checkpoint, job=SimpleNamespace(dump_folder=str(tmp_path)))
    assert launch.how_to_resume(config) == "; there is no checkpoint to resume from"
    for step, complete in ((2, True), (4, True), (6, False)):
        folder = tmp_path / f"checkpoint/step-{step}"
        folder.mkdir(parents=True)
        if complete:
            Record().write(folder)
    assert launch.how_to_resume(config).endswith(f"resume from {tmp_path}/checkpoint/step-4")
    # Another place is full, which the rank names.
    full = Failure(1, 1, "No space left on device: '/dev/shm/a'", tmp_path)
    assert f"left in {tmp_path}" not in launch.failure_line(full, config)
    checkpoint.enable = False
    config.job.dump_folder = str(tmp_path / "removed")
    line = launch.failure_line(Failure(1, 1, "its words", tmp_path), config)
    assert line.startswith(f"error: rank 1 failed: its words; its output: {tmp_path}; there is no")


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        ((5, -9, ""), "rank 5 was ended by SIGKILL"),
        ((5, -11, "Error: x"), "rank 5 failed: Error: x"),  # a crash in its cleanup
        ((5, 1, ""), "rank 5 failed with status 1"),
        ((None, None, "no store"), "no store"),
    ],
)
def test_a_failure_is_one_line(failure, said):
    assert str(Failure(*failure, Path("logs"))) == said


def test_what_is_told_beside_a_start(capsys):
    """Once, by the machine of rank 0, if ranks start; an error there ends nothing."""
    told, ended = [], Event()
    for first in (8, 0):
        signals = SimpleNamespace(agent=SimpleNamespace(meeting=False, first_rank=first))
        launch._once_started(signals, ended, lambda: told.append("modelled"))
    assert told == ["modelled"]
    launch._once_started(signals, ended, lambda: 1 // 0)
    assert capsys.readouterr().err.startswith("warning: no modelled time: ZeroDivisionError: ")
    ended.set()
    launch._once_started(SimpleNamespace(agent=None), ended, lambda: told.append("never"))
    assert told == ["modelled"]


def test_a_summary_has_a_line_for_each_validation_set():
    folder = Path("run")
    summary = {"val_loss": 4.6, "val_losses": {"books": 4.9, "code": None}}
    lines = [line.split("  ") for line in launch.summary_lines(summary, folder, folder / "logs")]
    shown = {parts[0]: parts[-1].strip() for parts in lines if "validation loss" in parts[0]}
    losses = ["4.6000 nats/token", "4.9000 nats/token", "-"]
    assert [*shown.values()] == losses and "validation loss of books" in shown
    launch.summary_lines({"val_losses": 3}, folder, folder)  # a damaged file
