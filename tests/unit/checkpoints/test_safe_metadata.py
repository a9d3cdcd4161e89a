# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""No way into a checkpoint runs what its pickles name."""

import io
import json
import os
import pickle
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as Format

from tests.unit.tiny import build_tiny
from torchtitan_lr.checkpoints import safe_metadata
from torchtitan_lr.checkpoints.manifest import find_damage
from torchtitan_lr.checkpoints.safe_metadata import DamagedError, load, read_metadata
from torchtitan_lr.compression.residuals import saved_residuals
from torchtitan_lr.config.files import files_kept
from torchtitan_lr.errors import ConfigError

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
    states |= build_tiny("cola").state_dict()
    dcp.save(states, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.fixture
def evil(saved: Path, tmp_path: Path) -> Path:
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    return saved


def test_a_table_is_read_once_while_files_are_kept(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is verified; a table that has changed is read anew, and none outlives this."""
    reads = []
    read = safe_metadata._read
    monkeypatch.setattr(safe_metadata, "_read", lambda path: (reads.append(path), read(path))[1])
    with files_kept():
        first = read_metadata(saved)
        assert find_damage(saved, allow_unverified=True) is None
        with files_kept():
            assert read_metadata(saved) is first and len(reads) == 1
        assert read_metadata(saved) is first
        first.planner_data = None
        (saved / ".metadata").write_bytes(pickle.dumps(first))
        assert read_metadata(saved) is not first and len(reads) == 2
    assert read_metadata(saved) is not read_metadata(saved) and len(reads) == 4


def test_what_dcp_writes_is_read_as_dcp_reads_it(saved: Path) -> None:
    reader = dcp.FileSystemReader(str(saved))
    theirs, ours = reader.read_metadata(), read_metadata(saved)
    theirs.storage_meta.load_id = None
    assert ours == theirs
    states: dict[str, Any] = {"train_state": dict.fromkeys(VALUES), "half": torch.zeros(2, 3)}
    load(states, saved, no_dist=True)
    assert states["train_state"] == VALUES
    assert states["half"].eq(1).all()


def test_upstream_would_run_it(evil: Path, tmp_path: Path) -> None:
    """The control: the pickle does what it says."""
    with pytest.raises(AttributeError):
        dcp.FileSystemReader(str(evil)).read_metadata()
    assert (tmp_path / "made").is_dir()


WAYS_IN: dict[str, Callable[[Path], Any]] = {
    "itself": read_metadata,
    "load": lambda step: load({"half": torch.zeros(2, 3)}, step, no_dist=True),
    "residuals": lambda step: saved_residuals(str(step)),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_no_way_in_runs_it(way: str, evil: Path, tmp_path: Path) -> None:
    with pytest.raises((DamagedError, ConfigError, CheckpointException)) as error:
        WAYS_IN[way](evil)
    if way != "load" or torch.__version__ >= "2.13":  # DCP of 2.11 drops the reason
        assert "names posix.mkdir, which no checkpoint needs" in str(error.value)
    assert not (tmp_path / "made").exists()


def test_enumerations_of_every_python_are_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = read_metadata(saved)
    monkeypatch.setattr(Format, "__reduce_ex__", lambda self, _: (getattr, (Format, self.name)))
    pickled = pickle.dumps(metadata)
    assert b"getattr" in pickled
    (saved / ".metadata").write_bytes(pickled)
    assert read_metadata(saved) == metadata


def test_a_ranks_own_metadata_is_not_read(evil: Path, tmp_path: Path) -> None:
    """Where DCP cannot read the common one it would take the rank's own."""
    (evil / "__0.metadata").write_bytes((evil / ".metadata").read_bytes())
    (evil / ".metadata").unlink()
    with pytest.raises(CheckpointException):
        load({"half": torch.zeros(2, 3)}, evil, no_dist=True)
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
        load(states, saved, no_dist=True)
    assert not (tmp_path / "made").exists()
    # The control: DCP's own way runs it.
    dcp.load({"train_state": dict.fromkeys(VALUES)}, checkpoint_id=str(saved), no_dist=True)
    assert (tmp_path / "made").is_dir()


def pickled(*operations: bytes) -> bytes:
    return b"".join([pickle.PROTO, b"\x04", *operations, pickle.STOP])


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


THEIRS = "torch.distributed.checkpoint.metadata"

ATTACKS = {
    "an attribute of a class": pickled(
        named("pathlib", "PosixPath"), pickle.EMPTY_DICT, text("__truediv__"), pickle.NONE,
        pickle.SETITEM, pickle.BUILD,
    ),
    "an attribute of DCP's class": pickled(
        named(THEIRS, "Metadata"), pickle.EMPTY_DICT, text("version"), text("x"), pickle.SETITEM,
        pickle.BUILD,
    ),
    "an attribute by slots": pickled(
        named(THEIRS, "Metadata"), pickle.NONE, pickle.EMPTY_DICT, text("version"), text("x"),
        pickle.SETITEM, pickle.TUPLE2, pickle.BUILD,
    ),
    "a member of an enumeration": pickled(
        named(THEIRS, "_MEM_FORMAT_ENCODING"), pickle.BININT1 + b"\0", pickle.TUPLE1, pickle.REDUCE,
        pickle.EMPTY_DICT, text("_value_"), text("x"), pickle.SETITEM, pickle.BUILD,
    ),
    # Hashing it takes 2 to the power of 60 steps.
    "a key of nested tuples": pickled(
        pickle.EMPTY_DICT, pickle.EMPTY_TUPLE, pickle.MEMOIZE,
        *(pickle.BINGET + bytes([n]) + pickle.TUPLE2 + pickle.MEMOIZE for n in range(60)),
        pickle.NONE, pickle.SETITEM,
    ),
    "nested tuples in a key's attribute": pickled(
        named(THEIRS, "MetadataIndex"), pickle.EMPTY_TUPLE, pickle.NEWOBJ, pickle.EMPTY_DICT,
        text("fqn"), pickle.EMPTY_TUPLE, pickle.SETITEM, pickle.BUILD,
    ),
    "a set": pickled(pickle.EMPTY_SET),
    "deep lists": pickled(pickle.EMPTY_LIST * 50_000, pickle.APPEND * 49_999),
    "a huge size": pickled(
        named("torch", "Size"), pickle.EMPTY_LIST, pickle.TUPLE1, pickle.REDUCE
    ),
    # Its representation has 2 to the power of 60 lists.
    "a call of nested lists": pickled(
        pickle.EMPTY_LIST, pickle.MEMOIZE,
        *(
            pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.MARK + 2 * (pickle.BINGET + bytes([n]))
            + pickle.APPENDS for n in range(60)
        ),
        pickle.EMPTY_TUPLE, pickle.REDUCE,
    ),
    # Numbers of one hash: a table of them takes the square of their number.
    "a long number": pickled(pickle.LONG1 + bytes([9]) + bytes(9)),
    # Each use of the tuple would copy it.
    "many dimensions": pickled(
        named("torch", "Size"), pickle.MARK, 65 * (pickle.BININT1 + b"\1"), pickle.TUPLE,
        pickle.TUPLE1, pickle.REDUCE,
    ),
    "a long path": pickled(
        named("pathlib", "PosixPath"), pickle.MARK, 4097 * text("a"), pickle.TUPLE, pickle.REDUCE,
    ),
    "a function of torch": pickled(named("torch", "load")),
    "a text without an end": pickled(pickle.BINUNICODE + b"\xff\xff\xff\x7f"),
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_a_table_of_contents_has_no_use_for(attack: str, saved: Path) -> None:
    (saved / ".metadata").write_bytes(ATTACKS[attack])
    classes = [Path, type(Path()), Format, dcp.Metadata, torch.Size]
    before = [dict(vars(each)) for each in classes]
    with pytest.raises(DamagedError):
        read_metadata(saved)
    assert [dict(vars(each)) for each in classes] == before


@pytest.mark.parametrize("protocol", [4, 5])
def test_flipped_bits_are_damage_or_data(saved: Path, protocol: int) -> None:
    """Whatever bits flip, what is read has the types of what DCP writes."""
    metadata = read_metadata(saved)
    whole = pickle.dumps(metadata, protocol)
    draw = random.Random(protocol)
    damaged = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 20])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (saved / ".metadata").write_bytes(data)
        try:
            found = read_metadata(saved)
        except DamagedError as error:
            damaged += 1
            assert "\n" not in str(error)
            continue
        assert all(type(name) is str for name in found.state_dict_metadata)
        assert all("/" not in info.relative_path for info in found.storage_data.values())
    assert damaged > 150


def test_what_later_versions_add_is_left_out(saved: Path) -> None:
    metadata = read_metadata(saved)
    wanted = pickle.dumps(metadata)
    metadata.new = {"a": [1]}  # type: ignore[attr-defined]
    other = pickle.dumps(metadata).replace(b"\x07pathlib", b"\x0epathlib._local")  # Python 3.13
    (saved / ".metadata").write_bytes(other)
    found = read_metadata(saved)
    assert pickle.dumps(found) == wanted and not hasattr(found, "new")


@pytest.mark.parametrize("attribute", ["offset", "length", "size", "properties", "sizes"])
def test_what_lacks_an_attribute_is_refused(attribute: str, saved: Path) -> None:
    metadata = read_metadata(saved)
    tensor = metadata.state_dict_metadata["half"]
    for made in (tensor, tensor.chunks[0], *metadata.storage_data.values()):
        vars(made).pop(attribute, None)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    damage = find_damage(saved, allow_unverified=True)
    assert damage is not None and damage.endswith(f"without {attribute}")


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "..", ".", ""])
def test_files_elsewhere_are_refused(saved: Path, name: str) -> None:
    metadata = read_metadata(saved)
    next(iter(metadata.storage_data.values())).relative_path = name
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedError, match="names a file outside its folder"):
        read_metadata(saved)


def test_a_pipe_is_not_waited_for(saved: Path) -> None:
    (saved / ".metadata").unlink()
    os.mkfifo(saved / ".metadata")
    with pytest.raises(DamagedError, match="not a regular file"):
        read_metadata(saved)


@pytest.mark.parametrize("name", ["../secret", "/dev/zero", "link", "pipe"])
def test_a_manifest_names_files_of_its_folder_alone(saved: Path, name: str) -> None:
    (saved.parent / "secret").write_bytes(b"secret")
    (saved / "link").symlink_to(saved.parent / "secret")
    os.mkfifo(saved / "pipe")
    size = 0 if name in ("/dev/zero", "pipe") else 6
    files = {name: [size, zlib.crc32(b"secret")]}
    (saved / "manifest.json").write_text(json.dumps({"files": files}))
    damage = find_damage(saved)
    assert damage is not None and damage.startswith(f"{name} cannot be read")


@pytest.mark.parametrize(
    "content",
    [b"5", b"[]", b"{", b"\xff", b"[" * 10**5, b'{"files": 5}', b'{"files": {"a": 5}}', b'{"b": 1}']
    + [b'{"files": {"a": [%s, 1]}}' % size for size in (b'"5"', b"null", b"[]", b"1e400", b"true")],
)
def test_a_manifest_of_other_types_is_damage(saved: Path, content: bytes) -> None:
    (saved / "manifest.json").write_bytes(content)
    damage = find_damage(saved)
    assert damage is not None and damage.startswith("manifest.json cannot be read (")
