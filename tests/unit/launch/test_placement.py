# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Ranks and degrees on any number of GPUs and machines; the device count is the only fake."""

import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.commands import ROOT
from torchtitan_lr.checkpoints.run_record import global_batch_size
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.commands.estimate_report import read_runs
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError, LostDeviceError
from torchtitan_lr.launch import launcher, placement
from torchtitan_lr.launch.run_folder import EXIT_STATUS, LOST

MAIN = f"--job.config_file={ROOT}/train_configs/debug_cola.toml"
TP, BATCH = "--parallelism.tensor_parallel_degree", "--training.global_batch_size"
LOCAL = "--training.local_batch_size"


@pytest.fixture
def gpus(variables, monkeypatch, tmp_path):
    """Sets how many GPUs torch finds."""
    import torch

    monkeypatch.delenv(placement.GPUS_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)  # where no earlier run lies

    def found(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: count, raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # NVML's, with the lost ones
        return monkeypatch

    return found


def placed(*arguments):
    """What is started, as the checks accept it."""
    found = placement.place(placement.read_environment(), list(arguments))
    check_job_config(found.config, found.environment.world_size, found.device, data="paper")
    return found


def batch(found):
    """Sequences per step."""
    return global_batch_size(found.config, found.environment.world_size)


def test_fewer_gpus_than_ranks(gpus):
    gpus(1)
    hide = r"at most 1, the GPUs here \(or CUDA_VISIBLE_DEVICES= to train on the CPU"
    with pytest.raises(LostDeviceError, match=rf"NGPU: got 4, expected {hide}"):
        placement.find_device(placement.Environment(4, 1, "0", ""))
    assert placement.find_device(placement.Environment(1, 1, "0", "")) == "cuda"
    # A dry run takes one GPU whatever NGPU says.
    assert placement.find_device(placement.Environment(64, 1, "0", "fake_backend")) == "cuda"
    patch = gpus(0)
    assert placement.find_device(placement.Environment(4, 1, "0", "")) == "cpu"
    patch.setenv(placement.GPUS_VARIABLE, "8")  # a cluster granted some, and none answers
    with pytest.raises(LostDeviceError, match="NGPU: got 4, expected at most 0, the GPUs here"):
        placement.find_device(placement.Environment(4, 1, "0", ""))
    assert placement.find_device(placement.Environment(4, 1, "0", "fake_backend")) == "cpu"


@pytest.mark.parametrize(
    ("count", "ranks", "degree", "note"),
    [
        (0, 4, 2, "no GPU here: training on 4 ranks"),
        (1, 1, 1, f"1 GPU here: training on 1 rank with {TP}=1"),
        (2, 2, 2, "2 GPUs here: training on 2 ranks"),
        # Three ranks cannot share 16 sequences.
        (3, 2, 2, "3 GPUs here: training on 2 ranks"),
        (4, 4, 2, ""),
        (8, 4, 2, ""),
    ],
)
def test_the_main_job_uses_the_gpus_there(gpus, count, ranks, degree, note):
    gpus(count)
    found = placed(MAIN)
    assert found.environment.ranks == ranks and found.note == note
    assert found.device == ("cuda" if count else "cpu")
    assert found.config.parallelism.tensor_parallel_degree == degree
    assert batch(found) == 16  # the same batches on every machine


def test_the_main_job_on_as_many_ranks_as_requested(gpus):
    patch = gpus(0)
    patch.setenv("NGPU", "1")
    found = placed(MAIN)
    assert (found.environment.ranks, found.device, batch(found)) == (1, "cpu", 16)
    assert found.arguments == [MAIN, f"{TP}=1"]
    assert found.note == f"training on 1 rank with {TP}=1"
    # What the command line says is not touched.
    assert placed(MAIN, f"{BATCH}=8").arguments == [MAIN, f"{BATCH}=8", f"{TP}=1"]
    with pytest.raises(ConfigError, match="tensor_parallel_degree: got 2"):
        placed(MAIN, f"{TP}=2")
    patch.setenv("NGPU", "8")
    found = placed(MAIN)
    assert (found.arguments, batch(found)) == ([MAIN, f"{LOCAL}=4"], 16)
    with pytest.raises(ConfigError, match=r"batch with --training.local_batch_size=4"):
        placed(MAIN, f"{LOCAL}=8")
    patch.setenv("NGPU", "3")  # no 16 sequences
    with pytest.raises(ConfigError, match="got 2, expected a divisor of the 3 ranks"):
        placed(MAIN)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["cola", "full", "svd", "lax", "caat", "finetune", "tsr", "tagc"])
def test_a_debug_file_trains_the_same_batches_on_any_ranks(gpus, tmp_path, name, ranks):
    gpus(0).setenv("NGPU", str(ranks))
    load = f"--checkpoint.initial_load_path={tmp_path}"
    config = f"--job.config_file={ROOT}/train_configs/debug_{name}.toml"
    given = [load] * (name == "finetune")
    found = placement.place(placement.read_environment(), [config, *given])
    check_job_config(found.config, ranks, "cpu", data="paper")
    assert (found.environment.ranks, batch(found)) == (ranks, 16)
    assert ("losses depend on the number" in found.note) == (name == "tagc" and ranks > 1)
    # An estimate is of the same run.
    paper = read_runs({name: config.partition("=")[2]}, ranks, "full", given)["as configured"]
    assert paper.tp == found.config.parallelism.tensor_parallel_degree


def test_a_degree_that_does_not_fit_is_refused_with_one_that_does(gpus, capsys, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text("include = 'debug_caat.toml'\n")  # not a shipped file: it is never changed
    config = f"--job.config_file={own}"
    gpus(3)
    assert placed(config).environment.ranks == 2
    gpus(1)
    assert launcher.main([config]) == 2
    told = "tensor_parallel_degree: got 2, expected a divisor of the 1 ranks: 1\n"
    assert capsys.readouterr().err.endswith(told)
    assert placed(config, f"{TP}=1").environment.ranks == 1


def test_a_rank_of_a_machine_that_lost_a_gpu_says_so(gpus, monkeypatch):
    """Of the launcher's ranks each, also where all GPUs are lost; of torchrun's those without."""
    from torchtitan_lr import train

    gpus(1)
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (variables | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "init_console", lambda *_: None)
    monkeypatch.setattr(train, "bind_device", lambda: "cuda")
    with pytest.raises(LostDeviceError, match="NGPU: got 2, expected at most 1, the GPUs here"):
        train.checked_config([MAIN], ExitStack())
    # Each rank sees one GPU, its own.
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(train, "checked_once", lambda *_: "signed")
    assert train.checked_config([MAIN], ExitStack())[1] == "signed"
    monkeypatch.setenv(placement.GPUS_VARIABLE, "2")
    assert train.main([MAIN]) == EXIT_STATUS[LOST]
    gpus(0)
    assert train.main([MAIN]) == EXIT_STATUS[LOST]


def test_the_launcher_tells_its_ranks_how_many_gpus_they_need(gpus):
    gpus(2).setenv("NGPU", "2")
    found = launcher.rank_variables(placement.read_environment())
    assert found[placement.GPUS_VARIABLE] == "2"
    gpus(1)  # a launcher that starts where a GPU is lost
    assert launcher.main([MAIN]) == EXIT_STATUS[LOST]
    gpus(0)
    found = launcher.rank_variables(placement.read_environment())
    assert placement.GPUS_VARIABLE not in found


def test_gpus_are_counted_in_a_process_that_has_not_seen_the_lost_ones(monkeypatch, tmp_path):
    there = placement.gpu_count()
    assert f"expected at most {there}, the GPUs here" in placement.lost_devices(there + 1)
    # A process that cannot start, ends by itself, says something else; and a driver that hangs.
    child = tmp_path / "child"
    monkeypatch.setattr(sys, "executable", str(child))
    for body in ("", "kill -KILL $$", "echo hello", "echo 0; exit 1", "echo 1", "echo 0", "hang"):
        if body:
            child.write_text(f"#!/bin/sh\n{body}\n".replace("hang", "exec sleep 600"))
            child.chmod(0o755)
        if body == "hang":
            monkeypatch.setattr(placement, "_ANSWER_SECONDS", 0.01)
        is_lost = body in ("echo 0", "hang")
        assert ("expected at most 0" in placement.lost_devices(1)) == is_lost, body


TWO_TO_FOUR = placement.Environment(1, 4, "0", "", min_nodes=2, max_restarts=1)


def on_machines(environment, *arguments):
    """Check the main job without tensor parallelism, whose ranks all read data."""
    config = build_job_config([MAIN, f"{TP}=1", f"{LOCAL}=1", *arguments])
    placement.check_machines(config, environment, "cpu")


def test_every_number_of_machines_must_fit(gpus):
    gpus(0)
    on_machines(TWO_TO_FOUR, f"{BATCH}=12")
    want = "NNODES: got '2:4', expected only numbers of machines that fit; 3 of 1 ranks: training."
    with pytest.raises(ConfigError, match=want):
        on_machines(TWO_TO_FOUR, f"{BATCH}=8")
    # Without the third it fits.
    on_machines(replace(TWO_TO_FOUR, min_nodes=4), f"{BATCH}=8")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (f"{BATCH}=-1", r"global_batch_size: got -1, .* with NNODES=2:4: -1 depends on"),
        ("--checkpoint.no_enable", r"checkpoint.enable: .* MAX_RESTARTS=1"),
        ("--checkpoint.load_only", r"load_only: got True, expected false with"),
        ("--checkpoint.load_step=3", r"load_step: got 3, expected -1 with MAX"),
    ],
)
def test_what_could_not_go_on(gpus, option, told):
    gpus(0)
    with pytest.raises(ConfigError, match=told):
        on_machines(TWO_TO_FOUR, f"{BATCH}=12", option)
    # One start of a fixed number of machines may be so; it looks for the step by itself.
    if "load_step" not in told:
        on_machines(replace(TWO_TO_FOUR, min_nodes=None, max_restarts=0), f"{BATCH}=12", option)
