# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Sweeps of a program in place of the training; tests/integration has a real one."""

import json
import os
import signal
import threading
import time

import pytest

from tests.commands import Command
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.experiments.sweep import Point, Sweep, parse_grid, points_of
from torchtitan_lr.launch.run_folder import write_state

sweep = Command("sweep")

CONFIG = "train_configs/debug_cola.toml"
SHORT = ["--training.steps=3", "--lr_scheduler.warmup_steps=1"]


def command(tmp_path, ranks, *more):
    grid = [f"--set=low_rank.rank={ranks}", "--set=optimizer.lr=1e-3,2e-3"]
    return [CONFIG, *grid, f"--out={tmp_path / 'ranks'}", *SHORT, *more]


def folders(started):
    return [command[1].rpartition("/")[2] for command in started]


def test_grid():
    grid = parse_grid(["low_rank.rank=16,32", "optimizer.lr=1e-3"])
    points = points_of("c.toml", grid, ["--training.steps=3"], "ranks")
    assert [p.name for p in points] == ["rank-16_lr-0.001", "rank-32_lr-0.001"]
    assert points[1].settings == {"low_rank.rank": "32", "optimizer.lr": "0.001"}
    assert points[1].arguments == [
        *("--training.steps=3", "--low_rank.rank=32", "--optimizer.lr=0.001"),
        *("--metrics.wandb_group=ranks", "--metrics.wandb_run_name=rank-32_lr-0.001"),
    ]
    both = parse_grid(["training.seq_len=64", "validation.seq_len=32,64"])
    (first, _) = points_of("c.toml", both, [], "g")
    assert first.name == "training.seq_len-64_validation.seq_len-32"
    with pytest.raises(ConfigError, match="names differ"):
        points_of("c.toml", {"a.path": ["x/y", "x:y"]}, [], "g")


def test_points_with_a_result_do_not_run_again(tmp_path, standin, capsys):
    work = tmp_path / "ranks"
    assert sweep.main(command(tmp_path, "16,32")) == 1
    assert len(standin) == 4
    rows = json.loads((work / "sweep.json").read_text())
    ends = [("finished", "")] * 2 + [("failed", "ValueError: no luck")] * 2
    assert [(row["status"], row["why"]) for row in rows] == ends
    assert rows[0]["parameters"] < rows[2]["parameters"]
    losses = [row.get("val_loss") for row in rows]
    assert losses == [pytest.approx(5.693147), 5.0, None, None]
    table = (work / "sweep.md").read_text()
    assert table.startswith("| low_rank.rank | optimizer.lr | status | why | parameters |")
    said, told = capsys.readouterr()
    assert table.strip() in said
    assert "rank-16_lr-0.002: starts\nrank-16_lr-0.002: finished, validation loss 5.0000\n" in told
    assert told.rstrip().endswith("rank-32_lr-0.002: failed: ValueError: no luck")
    standin.clear()
    assert sweep.main(command(tmp_path, "16,32")) == 1
    assert folders(standin) == ["rank-32_lr-0.001", "rank-32_lr-0.002"]
    standin.clear()
    # Another spelling of values and paths is the same point, and a folder may be moved.
    moved = [CONFIG.replace("train_configs/debug_cola.toml", "./debug_cola.toml"), *SHORT]
    moved += ["--set=low_rank.rank=16", "--set=optimizer.lr=0.001,0.2e-2"]
    (tmp_path / "ranks").rename(tmp_path / "moved")
    assert sweep.main([*moved, f"--out={tmp_path}/./moved", "--training.seq_len=128"]) == 0
    (tmp_path / "moved").rename(tmp_path / "ranks")
    # Logging may change between starts; what a result depends on may not.
    assert sweep.main(command(tmp_path, "16", "--metrics.log_freq=5")) == 0 and not standin
    assert sweep.main(command(tmp_path, "16", "--training.seq_len=64")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: --out: got")
    assert error.endswith("of other settings: training.seq_len is 128 there and 64 here")


def test_a_divergence_is_a_result(tmp_path, standin):
    grid = [CONFIG, "--set=optimizer.lr=2e-3,2e-1", f"--out={tmp_path / 'w'}", *SHORT]
    assert sweep.main(grid) == 0
    rows = json.loads((tmp_path / "w/sweep.json").read_text())
    assert [row["status"] for row in rows] == ["finished", "diverged"]
    assert "val_loss" not in rows[1] and rows[1]["why"] == "error: step 2: its own words"
    standin.clear()
    assert sweep.main(grid) == 0 and not standin


def test_a_stop_signal_is_passed_on_and_nothing_more_starts(tmp_path, standin, capsys):
    def interrupt():
        while not list(tmp_path.glob("ranks/*/ready")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):  # the process ends with it: `__main__`
        sweep.main(command(tmp_path, "64,16"))
    signal.signal(signal.SIGINT, before)
    assert folders(standin) == ["rank-64_lr-0.001"]
    assert "stopped: run the same command to continue" in capsys.readouterr().err
    rows = json.loads((tmp_path / "ranks/sweep.json").read_text())
    assert (rows[0]["status"], rows[0]["why"]) == ("stopped", "before its last step")
    assert rows[3]["status"] == "to do"


def test_as_many_points_at_once_as_jobs_on_gpus_of_their_own(tmp_path, standin, monkeypatch):
    """Five points of one GPU and one of two, on GPUs 4 to 6: never more than three in use."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    points = [Point(f"p{i}", CONFIG, SHORT) for i in range(6)]
    work = tmp_path / "w"
    work.mkdir()
    grid = Sweep(work, points, jobs=3)
    grid._gpus = {point.name: 1 + (point.name == "p2") for point in points}
    assert grid.run() == 0
    found = [json.loads((work / p.name / "summary.json").read_text()) for p in points]
    assert [len(row["gpus"].split(",")) for row in found] == [1, 1, 2, 1, 1, 1]
    overlaps = 0
    for one in found:
        for two in found:
            (a, b), (c, d) = one["time"], two["time"]
            if one is not two and a < d and c < b:
                overlaps += 1
                assert not {*one["gpus"].split(",")} & {*two["gpus"].split(",")}
    assert overlaps > 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set=rank=3"], "--set: got 'rank=3', expected section.key=value,value"),
        (["--set=a.b=1e-3,0.001"], "each value once"),
        (["--set=optimizer.lr=nan,inf"], "optimizer.lr: got nan"),
        (["--set=parallelism.tp_plan=btp,megatron"], "parallelism.tp_plan: got 'megatron'"),
        (["--set=job.dump_folder=a,b"], "job.dump_folder: got"),
        (["--set=a.b=1", "--metrics.wandb_group=a"], "metrics.wandb_group: got"),
        (["--set=low_rank.rank=3", "--out=README.md"], "README.md"),
    ],
)
def test_refusals(monkeypatch, tmp_path, capsys, arguments, expected):
    monkeypatch.setenv("NGPU", "4")
    assert expected in sweep.refusal(capsys, f"--out={tmp_path}", CONFIG, *arguments)


@pytest.mark.parametrize(
    ("state", "error", "said", "why"),
    [
        ("failed", "no luck", "error: rank 1 failed\nmore", "no luck"),
        ("running", "", "first\nKilled\n", "Killed"),  # its launcher was
        (None, "", "error: NGPU: got '0'", "error: NGPU: got '0'"),  # refused
        (None, "", "", "it ended with status 9"),
    ],
)
def test_why_a_point_failed(state, error, said, why, tmp_path):
    (tmp_path / "stderr.log").write_text(said)
    if state:
        write_state(tmp_path, state, error)
    assert Sweep(tmp_path, [])._why(tmp_path, 9) == why
