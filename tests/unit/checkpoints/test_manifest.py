# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A flipped bit, a short file and a missing one are found; a kill leaves no half-known save."""

import os
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_lr.checkpoints import manifest
from torchtitan_lr.checkpoints.layout import all_steps, complete_steps
from torchtitan_lr.checkpoints.manifest import (
    ManifestWriter,
    damage_of,
    find_damage,
    newest_whole_before,
    read_manifest,
    share_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(folder: Path) -> Path:
    states = {"weight": torch.arange(4096.0), "train_state": {"step": 7}}
    writer = ManifestWriter(folder, {"model.name": "llama_cola"})
    dcp.save(states, storage_writer=writer, no_dist=True)
    return folder


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return save(tmp_path / "step-4")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_it_records_every_file(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_CHUNK", 1000)  # a file is read in many pieces
    record = read_manifest(step)
    assert record is not None
    files = {path.name: path.read_bytes() for path in step.iterdir()}
    assert files.keys() == {"__0_0.distcp", ".metadata", "manifest.json"}
    del files["manifest.json"]
    assert record.files == {name: [len(b), zlib.crc32(b)] for name, b in files.items()}
    assert record.model == {"model.name": "llama_cola"}
    assert record.finite
    assert damage_of(step) is None


@pytest.mark.parametrize("at", [0, 8192, -1])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_one_bit_is_noticed(name: str, at: int, step: Path) -> None:
    flip(step / name, at % (step / name).stat().st_size)
    assert damage_of(step) == f"{name} has another checksum than when it was saved"


@pytest.mark.parametrize("recorded", [True, False], ids=["manifest", "old"])
def test_short_and_missing_files(recorded: bool, step: Path) -> None:
    if not recorded:
        (step / "manifest.json").unlink()
        assert damage_of(step) is None
    shard = step / "__0_0.distcp"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-64])
    assert damage_of(step) == f"__0_0.distcp has {size - 64} bytes instead of {size}"
    shard.unlink()
    assert damage_of(step) == "__0_0.distcp is missing"


def test_a_damaged_name_is_a_damage(step: Path) -> None:
    """Not an error of one rank, for which the others would wait."""
    manifest = step / "manifest.json"
    manifest.write_text(manifest.read_text().replace("__0_0.distcp", "_/0_0.distcp"))
    assert damage_of(step) == "_/0_0.distcp is missing"


def test_ranks_share_the_files(step: Path) -> None:
    """Each file is read by one rank: only that one finds what is wrong with it."""
    for name in ("__0_0.distcp", ".metadata"):
        whole = (step / name).read_bytes()
        flip(step / name, 100)
        verdicts = [find_damage(step, rank, 3) for rank in range(3)]
        assert sum(verdict is not None for verdict in verdicts) == 1
        (step / name).write_bytes(whole)
    assert [find_damage(step, rank, 3) for rank in range(3)] == [None] * 3


def test_a_rank_verifies_what_it_will_load() -> None:
    parts = [f"__{rank}_0.distcp" for rank in range(8)]
    assert [share_of(parts, rank, 8) for rank in range(8)] == [[part] for part in parts]
    # On fewer or more ranks: in the order of FSDP's shards, whatever the order of the sizes.
    halves = [share_of(parts[::-1], rank, 2) for rank in range(2)]
    assert [sorted(half) for half in halves] == [parts[:4], parts[4:]]
    assert [len(share_of(parts, rank, 16)) for rank in range(16)] == [1, 0] * 8
    # The ranks that wrote nothing leave no gap, and every file has one reader.
    some = [*parts[1::3], ".metadata", "model-00001-of-00002.safetensors"]
    for ranks in (1, 2, 3, 5):
        shares = [share_of(some, rank, ranks) for rank in range(ranks)]
        assert sorted(name for share in shares for name in share) == sorted(some)


def test_a_kill_before_the_renaming_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is there before the folder counts, and the folder counts only after."""

    class Killed(Exception):
        pass

    rename = Path.rename

    def die(path: Path, target: Path) -> Path:
        if Path(target).name == ".metadata":
            raise Killed
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(dcp.CheckpointException, match="Killed"):
            save(tmp_path / "step-4")
    assert read_manifest(tmp_path / "step-4") is not None
    assert (all_steps(tmp_path), complete_steps(tmp_path)) == ([4], [])


def test_the_newest_older_step_that_is_whole(step: Path, tmp_path: Path) -> None:
    for other in (1, 2, 3, 9, 10):
        shutil.copytree(step, tmp_path / f"step-{other}")
    flip(tmp_path / "step-3/__0_0.distcp", 300)
    os.unlink(tmp_path / "step-9/.metadata")
    assert newest_whole_before(step) == str(tmp_path / "step-2")
    assert newest_whole_before(tmp_path / "step-10") == str(step)
    assert newest_whole_before(tmp_path / "step-1") is None
