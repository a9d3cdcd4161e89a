# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A flipped bit, a short file and a missing one are found; a kill leaves no half-known save."""

import random
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_lr.checkpoints import saving
from torchtitan_lr.checkpoints.record import DamagedError, Record, read_step
from torchtitan_lr.checkpoints.saving import StepWriter, verified

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RECORD = Record({"model": {"model.name": "llama_cola"}}, {"optimizer": {"lr": 0.1}})


def save(folder: Path) -> Path:
    states = {"weight": torch.arange(4096.0), "train_state": {"step": 7}}
    dcp.save(states, storage_writer=StepWriter(folder, RECORD), no_dist=True)
    return folder


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return save(tmp_path / "step-4")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def damage_of(step: Path) -> str:
    with pytest.raises(DamagedError) as error:
        verified(step)
    return str(error.value)


def test_it_records_every_file(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_CHUNK", 1000)  # a file is read in many pieces
    record = verified(step)
    files = {path.name: path.read_bytes() for path in step.iterdir()}
    assert files.keys() == {"__0_0.distcp", ".metadata", "step.json"}
    del files["step.json"]
    assert record.files == {name: [len(b), zlib.crc32(b)] for name, b in files.items()}
    assert (record.states, record.run, record.finite) == (RECORD.states, RECORD.run, True)


@pytest.mark.parametrize("at", [0, 8192, -1])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_one_bit_is_noticed(name: str, at: int, step: Path) -> None:
    flip(step / name, at % (step / name).stat().st_size)
    assert damage_of(step) == f"{name} has another checksum than when it was saved"


def test_short_and_missing_files(step: Path) -> None:
    shard = step / "__0_0.distcp"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-64])
    assert damage_of(step) == f"__0_0.distcp has {size - 64} bytes instead of {size}"
    shard.unlink()
    assert damage_of(step) == "__0_0.distcp is missing"


def test_no_flipped_bit_of_a_record_loses_a_check(step: Path) -> None:
    path, whole = step / "step.json", read_step(step)
    content = path.read_bytes()
    for at in random.Random(0).sample(range(8 * len(content)), 300):
        data = bytearray(content)
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)
        try:
            assert read_step(step) == whole, data
        except DamagedError as error:
            assert str(error).startswith("step.json cannot be read (")
