# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import CheckpointManager as TitanCheckpointManager
from torchtitan.config import JobConfig

from torchtitan_lr.checkpoint import CheckpointManager
from torchtitan_lr.optim.build import build_optimizers


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Killed(Exception):
    """Stands where a kill would strike."""


def manager(tmp_path: Path, cls: type[Any], keep: int = 10) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    config = JobConfig()
    config.checkpoint.enable = True
    config.checkpoint.interval = 1
    config.checkpoint.keep_latest_k = keep
    config.optimizer.implementation = "for-loop"
    optimizers = build_optimizers([model], config.optimizer, None)
    return cls(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=None,
        states={},
        checkpoint_config=config.checkpoint,
        sd_adapter=None,
        base_folder=str(tmp_path),
    )


def save_and_die_before_metadata(checkpoints: Any, step: int, monkeypatch: Any) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    def die(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(CheckpointException, match="Killed"):
        patch.setattr(FileSystemWriter, "finish", die)
        checkpoints.save(step)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(("cls", "trusted"), [(CheckpointManager, 1), (TitanCheckpointManager, 2)])
def test_dying_while_a_step_is_saved_again_leaves_nothing_to_trust(
    cls: type[Any], trusted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchtitan's own manager would resume from the torn folder: step 2 instead of step 1."""
    checkpoints = manager(tmp_path, cls)
    checkpoints.states = {"model": checkpoints.states["model"]}
    checkpoints.save(1)
    checkpoints.save(2)
    save_and_die_before_metadata(checkpoints, 2, monkeypatch)
    assert checkpoints._find_load_step() == trusted


@pytest.mark.usefixtures("process_group")
def test_a_purged_checkpoint_loses_its_name_before_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: deleted.append(Path(path).name))
    checkpoints = manager(tmp_path, CheckpointManager, keep=2)
    checkpoints.states = {"model": checkpoints.states["model"]}
    for step in (1, 2, 3, 4):
        checkpoints.save(step)
    assert checkpoints.last_good().endswith("step-4")
    checkpoints.close()  # waits for the thread that deletes
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert {name for name in names if name.startswith("step-")} == {"step-3", "step-4"}
    assert len(names) == 4
    assert deleted
    assert not any(name.startswith("step-") for name in deleted)


def kept(checkpoints: Any) -> set[str]:
    checkpoints.close()  # waits for the thread that deletes
    return {path.name for path in Path(checkpoints.folder).iterdir() if path.name[:5] == "step-"}


def torn_folder(tmp_path: Path, step: int) -> None:
    """What a kill in the middle of a save leaves: data, and no metadata."""
    folder = tmp_path / f"checkpoint/step-{step}"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"half")


@pytest.mark.usefixtures("process_group")
def test_a_torn_folder_pushes_no_checkpoint_out(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, CheckpointManager, keep=2)
    checkpoints.states = {"model": checkpoints.states["model"]}
    checkpoints.save(1)
    checkpoints.save(2)
    torn_folder(tmp_path, 3)
    checkpoints.save(4)
    assert kept(checkpoints) == {"step-2", "step-3", "step-4"}


@pytest.mark.usefixtures("process_group")
def test_a_save_in_the_background_counts_before_it_is_complete(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, CheckpointManager, keep=2)
    checkpoints.states = {"model": checkpoints.states["model"]}
    checkpoints.save(1)
    checkpoints.save(2)
    torn_folder(tmp_path, 3)
    checkpoints._last_saved = str(tmp_path / "checkpoint/step-3")
    checkpoints._purge_stale_checkpoints()
    assert kept(checkpoints) == {"step-2", "step-3"}


@pytest.mark.usefixtures("process_group")
def test_an_interrupted_run_saves_its_step_once(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, CheckpointManager)
    checkpoints.states = {"model": checkpoints.states["model"]}
    checkpoints.save(3)
    written = (tmp_path / "checkpoint/step-3/.metadata").stat().st_mtime_ns
    checkpoints.save_interrupted(3)
    assert (tmp_path / "checkpoint/step-3/.metadata").stat().st_mtime_ns == written
    checkpoints.save_interrupted(4)
    assert (tmp_path / "checkpoint/step-4/.metadata").is_file()
