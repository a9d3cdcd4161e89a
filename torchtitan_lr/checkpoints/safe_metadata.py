# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Reading a checkpoint without running what it says.

DCP's ``.metadata`` is a pickle, and so are the values beside the tensors; a pickle can name any
function and have it called. Upstream reads both without a restriction. Here ``.metadata`` is
read by an interpreter of its own, which knows the operations and the classes that DCP itself writes
and their attributes, values are read as weights are, and names of files cannot leave the
checkpoint's folder.
"""

import io
import pickle
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_lr.checkpoints.folders import METADATA
from torchtitan_lr.compat.checkpointing import (
    METADATA_CLASSES,
    METADATA_FIELDS,
    PROPERTIES,
    StorageInfo,
    set_element,
)
from torchtitan_lr.config.files import read_kept, read_regular

_MOST_BYTES = 1 << 31  # of a table of contents; one of a thousand ranks has some hundred megabytes
_MOST_SIZES = 64  # of a tensor; a few bytes could name one long tuple again and again
_MOST_PARTS = 4096  # characters of a path, for the same reason


class DamagedError(Exception):
    """A file of a checkpoint is not what was saved; the message names it within its folder."""


class _Pickle:
    """Reads the few operations of pickle's protocols 4 and 5 that a table of contents consists of.

    Each operation takes time in proportion to its bytes. No operation changes a class, calls what
    is not listed here, or hashes more than a string, an integer or a `MetadataIndex`.
    """

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: list[Any] = []

    def read(self, data: bytes) -> Any:
        """Return the object of a whole pickle."""
        place, stop, operations = 0, pickle.STOP[0], {k[0]: v for k, v in _OPERATIONS.items()}
        while (code := data[place]) != stop:
            if code not in operations:
                raise ValueError(f"it has operation {code}, which no checkpoint needs")
            width, act = operations[code]
            place += 1
            number = 0
            if width:
                number, place = int.from_bytes(data[place : place + width], "little"), place + width
            if act in _WITH_BYTES:
                payload, place = data[place : place + number], place + number
                act(self, payload)
            else:
                act(self, number)
        (found,) = self.stack
        return found

    def nothing(self, number: int) -> None:
        """Skip a number: of the protocol, or of the bytes in a frame."""

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def text(self, payload: bytes) -> None:
        self.stack.append(payload.decode())

    def long(self, payload: bytes) -> None:
        if len(payload) > 8:  # such numbers can be chosen to have one hash
            raise ValueError("it has a number of more than 64 bits")
        self.stack.append(int.from_bytes(payload, "little", signed=True))

    def integer(self, number: int) -> None:
        self.stack.append(number - (number >> 31 << 32))

    def mark(self, number: int) -> None:
        self.marks.append(len(self.stack))

    def marked(self) -> list[Any]:
        """Take what was pushed since the last mark."""
        height = self.marks.pop()
        found, self.stack[height:] = self.stack[height:], []
        return found

    def memoize(self, number: int) -> None:
        self.memo.append(self.stack[-1])

    def recall(self, number: int) -> None:
        self.stack.append(self.memo[number])

    def pack(self, count: int) -> None:
        height = len(self.stack) - count
        self.stack[height:] = [tuple(self.stack[height:])]

    def append(self, values: list[Any]) -> None:
        _only(self.stack[-1], list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        table = _only(self.stack[-1], dict)
        for key, value in zip(values[::2], values[1::2], strict=True):
            table[_only(key, str, int, MetadataIndex)] = value

    def find(self, number: int) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(_find(_only(module, str), _only(name, str)))

    def create(self, number: int) -> None:
        arguments, kind = self.stack.pop(), _only(self.stack.pop(), type)
        known = kind is TensorProperties or kind in METADATA_FIELDS
        if arguments != () or not known:
            raise DamagedError(f"{METADATA} creates what no checkpoint needs")
        self.stack.append(kind.__new__(kind))

    def call(self, number: int) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        self.stack.append(_call(what, *_only(arguments, tuple)))

    def build(self, number: int) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is TensorProperties:
            for value, kind in zip(_only(state, tuple), PROPERTIES, strict=True):
                _only(value, kind)
            made.__setstate__(state)
            return
        known = METADATA_FIELDS[type(made)]
        for name, value in _only(state, dict).items():
            if name in known:  # a later version of torch may have more
                vars(made)[name] = _only(value, *known[name])


_OPERATIONS: dict[bytes, tuple[int, Callable[[_Pickle, Any], None]]] = {
    pickle.PROTO: (1, _Pickle.nothing),
    pickle.FRAME: (8, _Pickle.nothing),
    pickle.NONE: (0, lambda self, number: self.push(None)),
    pickle.NEWTRUE: (0, lambda self, number: self.push(True)),
    pickle.NEWFALSE: (0, lambda self, number: self.push(False)),
    pickle.EMPTY_TUPLE: (0, lambda self, number: self.push(())),
    pickle.EMPTY_LIST: (0, lambda self, number: self.push([])),
    pickle.EMPTY_DICT: (0, lambda self, number: self.push({})),
    pickle.BININT1: (1, _Pickle.push),
    pickle.BININT2: (2, _Pickle.push),
    pickle.BININT: (4, _Pickle.integer),
    pickle.LONG1: (1, _Pickle.long),
    pickle.SHORT_BINUNICODE: (1, _Pickle.text),
    pickle.BINUNICODE: (4, _Pickle.text),
    pickle.MEMOIZE: (0, _Pickle.memoize),
    pickle.BINGET: (1, _Pickle.recall),
    pickle.LONG_BINGET: (4, _Pickle.recall),
    pickle.MARK: (0, _Pickle.mark),
    pickle.TUPLE: (0, lambda self, number: self.push(tuple(self.marked()))),
    pickle.TUPLE1: (0, lambda self, number: self.pack(1)),
    pickle.TUPLE2: (0, lambda self, number: self.pack(2)),
    pickle.TUPLE3: (0, lambda self, number: self.pack(3)),
    pickle.APPEND: (0, lambda self, number: self.append([self.stack.pop()])),
    pickle.APPENDS: (0, lambda self, number: self.append(self.marked())),
    pickle.SETITEM: (
        0,
        lambda self, number: self.set_items([self.stack.pop(-2), self.stack.pop()]),
    ),
    pickle.SETITEMS: (0, lambda self, number: self.set_items(self.marked())),
    pickle.STACK_GLOBAL: (0, _Pickle.find),
    pickle.NEWOBJ: (0, _Pickle.create),
    pickle.REDUCE: (0, _Pickle.call),
    pickle.BUILD: (0, _Pickle.build),
}
"""Each operation by its byte: how many bytes of a number follow, and what it does."""

_WITH_BYTES = (_Pickle.text, _Pickle.long)
"""Operations whose number is the length of the bytes that follow."""


def _only(value: Any, *kinds: type) -> Any:
    """Return a value if it has one of these types, else raise a DamagedError."""
    if type(value) not in kinds and not (PurePath in kinds and isinstance(value, PurePath)):
        raise DamagedError(f"{METADATA} has a {type(value).__name__} where none belongs")
    return value


def _whole(made: Any, *kinds: type) -> Any:
    """Return a value of one of these types if it has all attributes of its class."""
    for name in METADATA_FIELDS[type(_only(made, *kinds))]:
        if not hasattr(made, name):
            raise DamagedError(f"{METADATA} has a {type(made).__name__} without {name}")
    return made


def _find(module: str, name: str) -> Any:
    """Return one of the known classes or values of torch, without any import."""
    if module.startswith("pathlib") and (module, name) in METADATA_CLASSES:
        return Path  # also of another Python, or of another system
    if (module, name) in METADATA_CLASSES:
        return vars(sys.modules[module])[name]
    if (module, name) == ("builtins", "getattr"):
        return getattr
    value = vars(torch).get(name) if module == "torch" else None
    if isinstance(value, torch.dtype | torch.layout):
        return value
    raise DamagedError(f"{METADATA} names {module}.{name}, which no checkpoint needs")


def _call(what: Any, *arguments: Any) -> Any:
    """Call a known class or function with arguments of the types that DCP writes."""
    if what is torch.Size and len(_only(*arguments, tuple)) <= _MOST_SIZES:
        return torch.Size([_only(number, int) for number in arguments[0]])
    if what is OrderedDict and not arguments:
        return {}
    if what is Path and len(arguments) <= _MOST_PARTS:
        parts = [_only(part, str) for part in arguments]
        if sum(map(len, parts)) <= _MOST_PARTS:
            return Path(*parts)
    if isinstance(what, type) and issubclass(what, Enum):
        return what(_only(*arguments, int))
    # Python 3.11.0 to 3.11.3 pickle a member of an enumeration as a getattr.
    if what is getattr and isinstance(arguments[0], type) and issubclass(arguments[0], Enum):
        return arguments[0][_only(arguments[1], str)]
    if getattr(what, "__name__", "") == "_get_layout":
        return _find("torch", _only(*arguments, str).removeprefix("torch."))
    # A few nested lists can have an endless representation: only the name is shown.
    name = getattr(what, "__name__", type(what).__name__)
    raise DamagedError(f"{METADATA} calls {name}, which no checkpoint needs")


def read_metadata(step_dir: str | Path) -> Metadata:
    """Read a checkpoint's table of contents; nothing of it is executed.

    A table of 20,000 tensor parts takes a second, and a resume looks into it several times: within
    `files_kept` it is read once.

    Raises:
        DamagedError: It is missing, cut off, has what DCP does not write, or names files elsewhere.
    """
    try:
        return read_kept(Path(step_dir) / METADATA, _read)
    except DamagedError:
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{METADATA} is missing") from error
    # A damaged one fails with whatever its reader stumbles over.
    except Exception as error:
        raise DamagedError(f"{METADATA} cannot be read ({describe(error)})") from error


def _read(path: Path) -> Metadata:
    metadata = _Pickle().read(read_regular(path, _MOST_BYTES))
    _check(metadata)
    return cast(Metadata, metadata)


def _check(metadata: Any) -> None:
    """Raise a DamagedError unless this is a table of contents with values of DCP's types."""
    if not isinstance(metadata, Metadata) or not metadata.storage_data:
        raise DamagedError(f"{METADATA} is no table of contents")
    for name, stored in metadata.state_dict_metadata.items():
        _only(name, str)
        _whole(stored, TensorStorageMetadata, BytesStorageMetadata)
        for chunk in getattr(stored, "chunks", []):
            _whole(chunk, ChunkStorageMetadata)
    for index, info in metadata.storage_data.items():
        _whole(index, MetadataIndex)
        name = _whole(info, StorageInfo).relative_path
        if name in ("", ".", "..") or PurePath(name).name != name:
            raise DamagedError(f"{METADATA} names a file outside its folder: {name!r}")
    for path in (metadata.planner_data or {}).values():
        for part in _only(path, tuple):
            _only(part, str, int)


def load(
    state_dict: dict[str, Any],
    step_dir: str | Path,
    no_dist: bool = False,
    metadata: Metadata | None = None,
) -> None:
    """Load a checkpoint of DCP in place, as `torch.distributed.checkpoint.load` does, but safely.

    Args:
        state_dict: The states to load; their values are replaced or filled.
        step_dir: The checkpoint's folder.
        no_dist: Whether this process reads alone, without any collective.
        metadata: The checkpoint's table of contents, if it has been read already.

    Raises:
        CheckpointException: The checkpoint cannot be read, or does not hold these states.
    """
    with warnings.catch_warnings():
        if no_dist:
            # DCP warns that it runs without a process group, which is what we ask for.
            warnings.simplefilter("ignore")
        reader = _Reader(step_dir)
        reader.contents = metadata
        dcp.load(state_dict, storage_reader=reader, planner=_Planner(), no_dist=no_dist)


def describe(error: BaseException) -> str:
    """Say in one line of what kind an exception is and what it says, if it says anything."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


class _Reader(FileSystemReader):
    contents: Metadata | None = None

    # Upstream looks for a parameter of the name kwargs: where there is none it does not try to
    # read a rank's own metadata, another pickle.
    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        metadata = self.contents or read_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)
