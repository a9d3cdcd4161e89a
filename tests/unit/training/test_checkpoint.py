# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Saves and loads of one process: kills, damage, going back, full disks, spoilt weights."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.full_disk import files_of_at_most
from torchtitan_lr.checkpoints.folders import complete_steps
from torchtitan_lr.config.build import config_class
from torchtitan_lr.console.log import console
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.optim.entries import build_optimizers
from torchtitan_lr.training.checkpoint import CheckpointManager

pytestmark = pytest.mark.usefixtures("one_rank")


def manager(folder: Path, steps: int = 0, keep: int = 10, mode: str = "disabled") -> Any:
    """A manager of a model alone, that has saved some steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    config = config_class()()
    config.checkpoint.enable = True
    config.checkpoint.interval = 1
    config.checkpoint.keep_latest_k = keep
    config.checkpoint.async_mode = mode
    config.optimizer.implementation = "for-loop"
    checkpoints = CheckpointManager(
        dataloader=None,
        model_parts=[model],
        optimizers=build_optimizers([model], config.optimizer, None),
        lr_schedulers=None,
        states={},
        checkpoint_config=config.checkpoint,
        sd_adapter=None,
        base_folder=str(folder),
    )
    checkpoints.states = {"model": checkpoints.states["model"]}
    for step in range(1, steps + 1):
        checkpoints.save(step)
    return checkpoints


def folders(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoint").iterdir())


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize(("how", "room"), [("save", 50_000), ("save_interrupted", 100)])
def test_a_checkpoint_that_cannot_be_written_is_one_line(
    mode: str, how: str, room: int, tmp_path: Path
) -> None:
    checkpoints = manager(tmp_path, mode=mode)
    checkpoints.states |= {"large": torch.zeros(50_000)}
    checkpoints.save(1)
    checkpoints.maybe_wait_for_staging()
    assert checkpoints.newest()
    with files_of_at_most(room), pytest.raises(RunFailedError) as error:
        getattr(checkpoints, how)(2)
        checkpoints.maybe_wait_for_staging()
        checkpoints.newest()
    line = str(error.value)
    assert line == "a checkpoint cannot be written (OSError: [Errno 27] File too large)"
    assert complete_steps(checkpoints.folder) == [1]


class Killed(Exception):
    """Stands where a kill would strike."""


def test_dying_while_a_step_is_saved_again_leaves_nothing_to_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchtitan's own manager would resume from the torn folder: step 2 instead of step 1."""
    checkpoints = manager(tmp_path, 2)

    def die(*args: Any, **kwargs: Any) -> None:
        raise Killed

    monkeypatch.setattr(FileSystemWriter, "finish", die)
    with pytest.raises((CheckpointException, RunFailedError), match="Killed"):
        checkpoints.save(2)
    assert complete_steps(checkpoints.folder) == [1]


def test_a_resumed_run_says_that_its_first_weights_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager(tmp_path, 2).close()
    resumed, said = manager(tmp_path), []
    resumed._section.initial_load_path = str(tmp_path / "other/step-1")
    monkeypatch.setattr(console, "info", lambda line, *args: said.append(line % args))
    assert resumed.load()
    assert any("initial_load_path is not read" in line for line in said)
    resumed.close()


def test_a_torn_folder_pushes_no_checkpoint_out(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, 2, keep=2)
    # What a kill in the middle of a save leaves: data, and no metadata.
    (tmp_path / "checkpoint/step-3").mkdir()
    (tmp_path / "checkpoint/step-3/__0_0.distcp").write_bytes(b"half")
    checkpoints.save(4)
    checkpoints.close()  # waits for the thread that deletes
    assert folders(tmp_path) == ["step-2", "step-3", "step-4"]


def test_milestones_stay(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=2)
    checkpoints._section.keep_every = 3
    for step in range(1, 8):
        checkpoints.save(step)
    checkpoints.close()
    assert folders(tmp_path) == ["step-3", "step-6", "step-7"]


def test_a_save_is_due_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ten minutes, or twenty times as long as the last save took; any step number."""
    checkpoints, now = manager(tmp_path, 1), [1000.0]
    checkpoints.interval = 1000
    monkeypatch.setattr("torchtitan_lr.training.checkpoint.time.monotonic", lambda: now[0])
    checkpoints._saved_at, checkpoints._save_seconds = 1000.0, 2.0
    found = []
    for now[0] in (1599.0, 1601.0):
        found.append(checkpoints.is_late())
    checkpoints._save_seconds = 40.0
    for now[0] in (1799.0, 1801.0):
        found.append(checkpoints.is_late())
    assert found == [False, True, False, True]
    checkpoints.save(2)
    assert complete_steps(checkpoints.folder) == [1]
    checkpoints.overdue = True
    checkpoints.save(3)
    assert complete_steps(checkpoints.folder) == [1, 3] and not checkpoints.is_late()
    checkpoints.save(4)  # not overdue any more
    assert complete_steps(checkpoints.folder) == [1, 3]
    checkpoints.close()


def test_saves_on_a_slow_disk_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is written in the background, none is due by time: the run would wait for it."""
    goes_on, finish = threading.Event(), FileSystemWriter.finish

    def wait(*args: Any, **kwargs: Any) -> Any:
        assert goes_on.wait(60)
        return finish(*args, **kwargs)

    monkeypatch.setattr(FileSystemWriter, "finish", wait)
    checkpoints = manager(tmp_path, 1, mode="async")
    checkpoints._saved_at -= 3600
    assert not checkpoints.is_late()
    goes_on.set()
    assert checkpoints.newest()
    assert checkpoints.is_late()
    checkpoints.close()


def test_the_next_start_deletes_what_a_kill_left(tmp_path: Path) -> None:
    manager(tmp_path, 2).close()
    for name in ("discarded-1-77", "step-3", "aside-9-0"):
        shutil.copytree(tmp_path / "checkpoint/step-1", tmp_path / "checkpoint" / name)
    for name in (".metadata", "step.json"):
        (tmp_path / "checkpoint/step-3" / name).unlink()  # killed in mid-save
    checkpoints = manager(tmp_path)
    assert checkpoints.load()
    checkpoints.close()
    assert folders(tmp_path) == ["aside-9-0", "step-1", "step-2"]


def test_what_a_run_leaves_behind_by_going_back_is_kept(tmp_path: Path) -> None:
    for _ in range(2):
        checkpoints = manager(tmp_path, 3)
        assert checkpoints.load(1)
        checkpoints.close()
    assert folders(tmp_path) == ["aside-2-0", "aside-2-1", "aside-3-0", "aside-3-1", "step-1"]


@pytest.mark.parametrize("step", [-1, 4])
def test_a_flipped_bit_is_refused_and_the_step_before_named(step: int, tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, 4)
    shard = tmp_path / "checkpoint/step-4/__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ConfigError) as error:
        checkpoints.load(step)
    line = str(error.value)
    assert line.startswith(f"checkpoint: got '{shard.parent}', expected a whole one")
    assert "(__0_0.distcp has another checksum than when it was saved)" in line
    assert "; checkpoint.load_step = 3 goes back to the step before; for a new run" in line
    assert folders(tmp_path) == ["step-1", "step-2", "step-3", "step-4"]
    assert checkpoints.load(3)
    assert folders(tmp_path) == ["aside-4-0", "step-1", "step-2", "step-3"]


@pytest.mark.parametrize("contents", [".metadata", "model.safetensors.index.json"])
def test_a_step_without_a_record_is_skipped_and_kept(
    contents: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = manager(tmp_path, 2)
    step = tmp_path / "checkpoint/step-2"
    assert checkpoints.load() and "WARNING" not in caplog.text
    (step / "step.json").unlink()
    (step / ".metadata").rename(step / contents)
    assert checkpoints.load()
    assert "step-2 is without step.json: renamed to " in caplog.text
    assert folders(tmp_path) == ["aside-2-0", "step-1"]


@pytest.mark.parametrize("ruin", [float("nan"), 1e30])
def test_ruined_weights_are_no_good_checkpoint(ruin: float, tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, 2)
    assert checkpoints.newest() == f"{tmp_path}/checkpoint/step-2"
    with torch.no_grad():
        checkpoints.states["model"].model[0].weight[1, 2] = ruin
    checkpoints.save(3)
    assert checkpoints.newest() == f"{tmp_path}/checkpoint/step-2"
    with pytest.raises(ConfigError, match=r"finite weights; checkpoint.load_step = 2 goes back"):
        checkpoints.load(3)
    assert checkpoints.load() and folders(tmp_path) == ["aside-3-0", "step-1", "step-2"]
