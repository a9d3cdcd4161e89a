# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""No way into a checkpoint runs what its pickles name."""

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from tests.unit.tiny import build_tiny, tiny_args
from torchtitan_lr.checkpoints.record import DamagedError, Record
from torchtitan_lr.checkpoints.safe_metadata import load, read_metadata
from torchtitan_lr.checkpoints.saving import write_record
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.training.loading import load_weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VALUES = {"step": 3, "name": "a", "rate": 0.5, "flag": True, "pair": (1, 2)}


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with tensors of some kinds and values of all that a run saves."""
    folder = tmp_path / "step-1"
    states = {"train_state": dict(VALUES), "half": torch.ones(2, 3).bfloat16()}
    states |= {"list": [torch.zeros(1)]} | build_tiny("cola").state_dict()
    dcp.save(states, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.fixture
def evil(saved: Path, tmp_path: Path) -> Path:
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    write_record(saved, Record())
    return saved


def test_what_dcp_writes_is_read_as_dcp_reads_it(saved: Path) -> None:
    reader = dcp.FileSystemReader(str(saved))
    theirs, ours = reader.read_metadata(), read_metadata(saved)
    assert theirs.storage_meta is not None
    theirs.storage_meta.load_id = None
    assert ours == theirs
    states: dict[str, Any] = {"train_state": dict.fromkeys(VALUES), "half": torch.zeros(2, 3)}
    load(states, saved)
    assert states["train_state"] == VALUES
    assert states["half"].eq(1).all()


WAYS_IN: dict[str, Callable[[Path], Any]] = {
    "itself": read_metadata,
    "load": lambda step: load({"half": torch.zeros(2, 3)}, step),
    "commands": lambda step: load_weights(step, tiny_args("cola")),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_no_way_in_runs_it(way: str, evil: Path, tmp_path: Path) -> None:
    with pytest.raises((DamagedError, ConfigError, CheckpointException)) as error:
        WAYS_IN[way](evil)
    if way != "load" or torch.__version__ >= "2.13":  # DCP of 2.11 drops the reason
        assert "names posix.mkdir, which no checkpoint needs" in str(error.value)
    assert not (tmp_path / "made").exists()


def test_a_ranks_own_metadata_is_not_read(evil: Path, tmp_path: Path) -> None:
    """Where DCP cannot read the common one it would take the rank's own."""
    (evil / "__0.metadata").write_bytes((evil / ".metadata").read_bytes())
    (evil / ".metadata").unlink()
    with pytest.raises(CheckpointException):
        load({"half": torch.zeros(2, 3)}, evil)
    assert not (tmp_path / "made").exists()


def replace_value(step: Path, name: str, value: object) -> None:
    """Put a pickle of another object where a value of the checkpoint lies."""
    metadata = dcp.FileSystemReader(str(step)).read_metadata()
    (key,) = (key for key in metadata.storage_data if key.fqn == name)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    (step / "evil.distcp").write_bytes(buffer.getvalue())
    info = metadata.storage_data[key]
    info.relative_path, info.offset, info.length = "evil.distcp", 0, buffer.tell()
    (step / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_value_is_not_run_either(saved: Path, tmp_path: Path) -> None:
    replace_value(saved, "train_state.step", Evil(tmp_path / "made"))
    states: dict[str, Any] = {"train_state": dict.fromkeys(VALUES)}
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        load(states, saved)
    assert not (tmp_path / "made").exists()
    # The control: DCP's own way runs it.
    dcp.load({"train_state": dict.fromkeys(VALUES)}, checkpoint_id=str(saved), no_dist=True)
    assert (tmp_path / "made").is_dir()


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "", ".."])
def test_files_elsewhere_are_refused(saved: Path, name: str) -> None:
    metadata = read_metadata(saved)
    next(iter(metadata.storage_data.values())).relative_path = name
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="names a file outside its folder"):
        read_metadata(saved)
