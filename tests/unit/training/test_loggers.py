# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TensorBoard and wandb of a run and of its resumption, read back from what they write offline."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.full_disk import files_of_at_most
from tests.support.nightly import nightly
from tests.support.processes import child_pids
from tests.wandb_file import parts, values_of
from tests.wandb_server import wandb_server
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.training.metrics import WANDB_ID_FILE, Loggers, RunTensorBoard, RunWandb

SUMMARY = {"steps": 4, "train_loss": 4.5}


def run_of(folder):
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return path


def written(folder):
    """The parts of a run that has ended; wandb's own process writes them a moment later."""
    until = time.monotonic() + 30
    while "exit" not in parts(run_of(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    return parts(run_of(folder))


@pytest.fixture
def metrics(tmp_path, monkeypatch):
    """Keys of wandb, where neither variables nor credentials are set."""
    for variable in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    keys = ["project=low-rank", "run_name=run 7", "group=ranks", "tags=a,b"]
    return build_job_config([f"--metrics.wandb_{key}" for key in keys]).metrics


def test_wandb_continues_its_run_and_ends_as_failed(tmp_path, metrics):
    (tmp_path / WANDB_ID_FILE).write_text("of-before\n")
    first = RunWandb(tmp_path, 0, {"training": {"steps": 3}}, metrics)
    first.log({"loss": 5.0}, 3)
    first.alert("Loss spike", "step 3: loss 5.000")
    first.publish(SUMMARY)
    first.close()
    found = written(tmp_path)
    kept, _ = (tmp_path / WANDB_ID_FILE).read_text().split()
    assert [(run.run_id, run.resume) for run in found["run"]] == [(kept, True)]
    assert kept != "of-before"  # the control: this run starts anew
    (run,) = found["run"]  # offline, without credentials
    values = run.project, run.display_name, run.run_group, sorted(run.tags)
    assert values == ("low-rank", "run 7", "ranks", ["a", "b"])
    assert [end.exit_code for end in found["exit"]] == [0]
    (alert,) = found["alert"]
    assert (alert.title, alert.text, alert.level) == ("Loss spike", "step 3: loss 5.000", "WARN")
    summary = {}
    for change in found["summary"]:
        summary |= values_of(change.update)
    assert summary["train_loss"] == 4.5
    # A resumption from step 3, which fails: the same run in a file of its own.
    run_of(tmp_path).parent.rename(tmp_path / "first")
    second = RunWandb(tmp_path, 3, {"training": {"steps": 9}}, metrics)
    second.log({"loss": 4.0}, 4)
    second.close(1)
    found = written(tmp_path)
    # By `resume`, `wandb sync` asks for the end of the first part and appends to it.
    assert [(run.run_id, run.resume) for run in found["run"]] == [(kept, True)]
    assert [end.exit_code for end in found["exit"]] == [1]
    config = {}
    for change in [found["run"][0].config, *found.get("config", [])]:
        config |= values_of(change.update)
    assert config["training"] == {"steps": 9}


@pytest.mark.parametrize(
    ("differs", "goes_on"),
    [("repeats", False), ("copied", False), *nightly(("no", True), ("moved", True))],
)
def test_which_wandb_run_a_resumption_continues(differs, goes_on, tmp_path, metrics):
    """wandb keeps the first losses of a step, so that others need a run of their own."""
    first, then = tmp_path / "a", tmp_path / "a"
    first.mkdir()
    RunWandb(first, 0, {}, metrics).close()
    (kept, _) = (first / WANDB_ID_FILE).read_text().split()
    if differs in ("copied", "moved"):
        then = tmp_path / "b"
        shutil.copytree(first, then)
    if differs == "moved":
        shutil.rmtree(first)
    shutil.rmtree(then / "wandb")
    RunWandb(then, 4, {}, metrics, differs == "repeats").close()
    (run,) = written(then)["run"]
    assert (run.run_id == kept) == goes_on
    assert (then / WANDB_ID_FILE).read_text().split() == [run.run_id, f"{then / WANDB_ID_FILE}"]
    said = f"from {kept} at step 4"
    assert (run.notes, run.run_group) == ("" if goes_on else said, "ranks")


def opened_wandb(tmp_path, metrics):
    loggers = Loggers()
    loggers.open(RunWandb, tmp_path, 0, {}, metrics)
    assert len(loggers.opened) == 1
    return loggers


def use_until(use, done):
    """Use loggers until it has come to something: the first uses may still be taken."""
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        use()
        time.sleep(0.05)


@pytest.mark.parametrize("point", ["log", *nightly("alert", "publish", "close")])
def test_no_end_of_wandbs_process_ends_a_run(point, tmp_path, metrics, caplog):
    loggers = opened_wandb(tmp_path, metrics)
    uses = {
        "log": lambda: loggers.log({"loss": 1.0}, 2),
        "alert": lambda: loggers.alert("Slow steps", "step 2"),
        "publish": lambda: loggers.publish(SUMMARY),
        "close": loggers.close,
    }
    loggers.log({"loss": 1.0}, 1)
    for pid in child_pids(os.getpid()):
        if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    use_until(uses[point], lambda: not loggers.opened)
    loggers.close()
    assert caplog.text.count("wandb cannot be used, training goes on without it: ") == 1
    # Nothing is left of it: another run in this process has another one.
    opened_wandb(tmp_path, metrics).close()


@pytest.mark.parametrize("broken", [(200, "<html>no</html>"), *nightly(((500, "no"),))])
def test_no_answer_of_wandbs_server_ends_a_run(broken, tmp_path, metrics, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "1")  # of a minute
    wandb.teardown()  # which has read the variables of another run
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        loggers = opened_wandb(tmp_path, metrics)
        assert not loggers.opened[0]._run.offline and server.asked
        server.broken = broken
        answered = len(server.asked)
        use_until(lambda: loggers.log({"loss": 1.0}, 2), lambda: len(server.asked) > answered)
        loggers.publish(SUMMARY)
        began = time.monotonic()
        loggers.close()
        assert time.monotonic() - began < 30
        wandb.teardown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("room", [0, 4096])
def test_a_full_disk_costs_tensorboard_alone(room, tmp_path, caplog):
    """At the start, or later: it is its thread that writes."""
    loggers = Loggers()
    with files_of_at_most(room):
        loggers.open(RunTensorBoard, tmp_path / "tb", 0, {})
        assert len(loggers.opened) == (room > 0)
        if room:
            texts = {"loss": 1.0, "x" * 500: 2.0}
            for step in range(1, 50):
                loggers.log(texts, step)
        loggers.close()
    assert loggers.opened == []
    assert caplog.text.count("TensorBoard cannot be used, training goes on without it: ") == 1


def test_tensorboard_continues_its_folder(tmp_path):
    folder = tmp_path / "tb"
    first = RunTensorBoard(folder, 0, {"training": {"steps": 9}})
    for step in range(1, 6):
        first.log({"loss": 10.0 - step}, step)
    first.close()
    second = RunTensorBoard(folder, 3, {"training": {"steps": 9}})
    second.log({"loss": 1.0}, 4)
    second.close()
    (place,) = folder.iterdir()
    board = EventAccumulator(str(place))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("loss")]
    assert shown == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 1.0)]  # 4 and 5 of the first are gone
    assert "config/text_summary" in board.Tags()["tensors"]
