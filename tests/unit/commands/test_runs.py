# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The list of runs, from folders as runs leave them."""

import json
import os

from tests.commands import Command
from torchtitan_lr.launch.run_folder import (
    FAILED,
    FINISHED,
    LOCK_FILE,
    RUNNING,
    STOPPED,
    locked,
    write_state,
)
from torchtitan_lr.training.history import build_summary, read_history

runs = Command("runs")


def leave(folder, step, steps=10, state=None, why="", config="a.toml", **sections):
    folder.mkdir(parents=True)
    record = {"job": {"config_file": config}, "training": {"steps": steps}}
    record["model"] = {"name": "llama_cola", "flavor": "debug"}
    (folder / "job_config.json").write_text(json.dumps(record | sections))
    rows = [
        {"step": k, "loss_metrics/global_avg_loss": 9.0 - k, "n_tokens_seen": 64 * k}
        for k in range(1, step + 1)
    ]
    rows.append({"step": step, "validation_metrics/loss": 5.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / LOCK_FILE).write_text("{}")
    if state:
        write_state(folder, state, why)


def listed(capsys, *arguments):
    assert runs.main([*map(str, arguments), "--json"]) == 0
    return {os.path.basename(row["run"]): row for row in json.loads(capsys.readouterr().out)}


def test_states_and_losses(tmp_path, capsys):
    leave(tmp_path / "done", 10, state=FINISHED)
    leave(tmp_path / "sweep" / "bad", 4, state=FAILED, why="step 5: loss of rank 0 is not finite")
    leave(tmp_path / "paused", 3, state=STOPPED, why="SIGTERM after step 3")
    leave(tmp_path / "killed", 2, state=RUNNING)
    leave(tmp_path / "busy", 1, state=RUNNING, config=None)
    leave(tmp_path / "old", 6)
    (tmp_path / "done" / "logs" / "x").mkdir(parents=True)
    (tmp_path / "done" / "logs" / "x" / "metrics.jsonl").write_text("")  # is no run
    with locked(str(tmp_path / "busy")):
        found = listed(capsys, tmp_path)
    states = {"busy": RUNNING, "done": FINISHED, "killed": FAILED, "old": STOPPED}
    states |= {"paused": STOPPED, "bad": FAILED}
    assert {name: run["state"] for name, run in found.items()} == states
    assert found["bad"]["why"] == "step 5: loss of rank 0 is not finite"
    assert found["killed"]["why"].startswith("killed") and found["busy"]["why"] == ""
    assert found["busy"]["config"] == "llama_cola debug" and found["done"]["config"] == "a.toml"
    bad = found["bad"]
    assert (bad["step"], bad["steps"], bad["loss"], bad["validation"]) == (4, 10, 5.0, 5.5)
    # The lock tells the two apart: without it the busy run is a killed one.
    assert listed(capsys, tmp_path / "busy")["busy"]["state"] == FAILED


def test_no_run(tmp_path, capsys):
    status, out, err = runs.ask(capsys, tmp_path)
    assert (status, out, err) == (1, "", f"error: there is no run below {tmp_path}\n")


CONTROLS = "\x1b[2J\x07\r\x9b\u202e"

NUMBER = b'{"step": 0, "n_tokens_seen": 5, "loss_metrics/global_avg_loss": %s}'
JOB = b'{"job": {"config_file": %s}}'

BROKEN = {
    "metrics.jsonl": [
        *(b"", b"5", b"{", b"\xff\xfe", b"[" * 100_000, b'{"step": "3"}', b'{"step": 1e999}'),
        *(NUMBER % value for value in (b'"\\u001b"', b"NaN", b"1" + b"0" * 400)),
    ],
    "job_config.json": [
        *(b"", b"5", b"{", b"\xff", b"[" * 100_000, b'{"job": 5}', JOB % b'["a"]'),
        JOB % json.dumps(CONTROLS).encode(),
    ],
    "run_state.json": [
        *(b"", b"5", b"\xff", b'{"state": 5}', b'{"state": "failed", "error": [5]}'),
        json.dumps({"state": "failed", "error": CONTROLS}).encode(),
    ],
}
"""Contents that runs, disks and strangers leave."""


def test_a_damaged_run_costs_its_own_cells(tmp_path, capsys):
    leave(tmp_path / "whole", 10, state=FINISHED)
    for file, contents in BROKEN.items():
        for place, content in enumerate(contents):
            leave(tmp_path / f"{file}-{place}", 3)
            (tmp_path / f"{file}-{place}" / file).write_bytes(content)
    for file in (*BROKEN, LOCK_FILE):  # what never ends, or waits
        for name, make in {
            "pipe": os.mkfifo,
            "folder": os.mkdir,
            "device": lambda path: os.symlink("/dev/zero", path),
        }.items():
            leave(tmp_path / f"{file}-{name}", 3)
            (tmp_path / f"{file}-{name}" / file).unlink(missing_ok=True)
            make(tmp_path / f"{file}-{name}" / file)
    odd = tmp_path / f"$\\frac$ <b>{CONTROLS}"
    leave(odd, 3)
    assert runs.main([str(odd), "--plot", str(tmp_path / "a.png")]) == 0
    capsys.readouterr()
    assert runs.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert len(lines) == 1 + len(list(tmp_path.glob("*/"))) and "".join(lines).isprintable()
    (whole,) = (line for line in lines if "/whole" in line)
    assert whole.split()[1:] == ["a.toml", "finished", "10/10", "-1.0000", "5.5000"]
    # The rest of a record, and of a run, is there.
    rows = listed(capsys, tmp_path)
    assert {row["step"] for name, row in rows.items() if name.startswith("job_config")} == {3}
    assert rows["job_config.json-3"]["config"] == "-"
    assert rows["metrics.jsonl-pipe"]["config"] == "a.toml"


def test_the_loss_is_the_summarys_and_differing_keys_are_listed(tmp_path, capsys):
    for name, rate in (("a", 1e-3), ("b", 2e-3)):
        sections = {"optimizer": {"lr": rate, "eps": 1e-8}, "metrics": {"wandb_run_name": name}}
        sections["checkpoint"] = {"interval": round(1e4 * rate)}  # derived, as an experiment's
        sections["environment"] = {"ranks": round(1e3 * rate), "torch": "2.13.0"}
        leave(tmp_path / name, 2, state=FINISHED, **sections)
        row = {"step": 3, "loss_metrics/global_avg_loss": 6.0, "interval_loss": 6.5}
        with (tmp_path / name / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    found = listed(capsys, tmp_path)
    assert [run["loss"] for run in found.values()] == [6.5, 6.5]
    settings = {key: value for key, value in found["b"].items() if "." in key}
    assert settings == {"optimizer.lr": 2e-3, "environment.ranks": 2}
    history = read_history(tmp_path / "a" / "metrics.jsonl")
    assert build_summary(history, 3, 0.0, None)["train_loss"] == 6.5
    assert runs.main([str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.partition("\n\n")[2].splitlines()]
    assert rows[0] == ["run", "optimizer.lr", "environment.ranks"]
    assert rows[1:] == [[f"{tmp_path}/a", "0.001", "1"], [f"{tmp_path}/b", "0.002", "2"]]
