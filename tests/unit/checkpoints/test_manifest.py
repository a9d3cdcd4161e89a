# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A flipped bit, a short file and a missing one are found; a kill leaves no half-known save."""

import json
import os
import random
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.unit.tiny import tiny_args
from torchtitan_lr.checkpoints import manifest
from torchtitan_lr.checkpoints.folders import all_steps, complete_steps
from torchtitan_lr.checkpoints.manifest import (
    Manifest,
    ManifestWriter,
    damage_of,
    find_damage,
    newest_whole_before,
    read_manifest,
    share_of,
)
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.training.checkpoint import CheckpointManager
from torchtitan_lr.training.fingerprint import check_fingerprint, model_fingerprint

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
        assert damage_of(step, allow_unverified=True) is None
    shard = step / "__0_0.distcp"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-64])
    expected = f"__0_0.distcp has {size - 64} bytes instead of {size}"
    assert damage_of(step, allow_unverified=not recorded) == expected
    shard.unlink()
    assert damage_of(step, allow_unverified=not recorded) == "__0_0.distcp is missing"


ADVICE = ": nothing says what was saved; checkpoint.allow_unverified = true loads"


@pytest.mark.parametrize("lost", ["all", "file", "files", ".metadata", "list"])
def test_a_manifest_that_names_too_little_is_refused(lost: str, step: Path) -> None:
    path = step / "manifest.json"
    content = json.loads(path.read_text())
    del content["checksum"]  # as of a version that wrote none
    if lost == "files":
        content["files"] = {}
    elif lost == "list":
        content = [content]
    else:
        content["files"].pop("__0_0.distcp" if lost == "file" else lost, None)
    path.write_text(json.dumps(content))
    if lost == "all":
        path.unlink()
    assert ADVICE in str(damage_of(step))
    assert find_damage(step, rank=1, ranks=2, files={}) is None  # the first rank finds it
    assert damage_of(step, allow_unverified=True) is None


def flipped_bits(content: bytes, count: int) -> Iterator[bytes]:
    """Copies of some bytes with one bit flipped, another one in each."""
    source = random.Random(0)
    for at in source.sample(range(8 * len(content)), count):
        data = bytearray(content)
        data[at // 8] ^= 1 << at % 8
        yield bytes(data)


@pytest.mark.parametrize("sealed", [True, False], ids=["checksum", "earlier_version"])
def test_no_flipped_bit_of_a_manifest_loses_a_check(sealed: bool, step: Path) -> None:
    model = model_fingerprint(tiny_args("cola"))
    path, whole = step / "manifest.json", replace(read_manifest(step), model=model)
    content = json.loads(whole.as_json())
    if not sealed:
        del content["checksum"]
    for data in flipped_bits(json.dumps(content, indent=1).encode(), 400):
        path.write_bytes(data)
        with suppress(ConfigError):
            if damage_of(step) is None:
                check_fingerprint(read_manifest(step).model, model, step)
                assert read_manifest(step) == whole, data


def test_a_damaged_name_is_a_damage(step: Path) -> None:
    """Not an error of one rank, for which the others would wait."""
    path = step / "manifest.json"
    files = {name.replace("__0_0", "_/0_0"): s for name, s in read_manifest(step).files.items()}
    path.write_text(Manifest(files).as_json())
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


class OfSaved(CheckpointManager):
    """What looks for saved checkpoints of a manager that saves none."""

    def __init__(self, folder: Path) -> None:
        self.enable, self.folder = True, str(folder)

    def __del__(self) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


@pytest.mark.parametrize("what", ["newest", "newest_whole_before"])
def test_the_first_rank_alone_lists_a_folder(
    what: str, step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand would list it at the same moment; the second one here receives its answer."""

    def search() -> object:
        if what == "newest_whole_before":
            return newest_whole_before(step)
        return OfSaved(step.parent).newest()

    listed: list[str] = []
    listing = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(str(path)) or listing(path))
    search()
    assert listed == [str(step.parent)]  # the control: alone, this process does
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    answer = "an answer" if what == "newest" else []

    def receive(box: list[object], src: int) -> None:
        box[0] = [answer, None]

    monkeypatch.setattr(dist, "broadcast_object_list", receive)
    assert search() == (answer or None)
    assert len(listed) == 1
