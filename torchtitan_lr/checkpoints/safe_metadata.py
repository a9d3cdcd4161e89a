# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Reading a checkpoint without running what it says.

DCP's ``.metadata`` is a pickle, and so are the values beside the tensors; a pickle can name any
function and have it called. Upstream reads both without a restriction. Here ``.metadata`` may name
the classes that DCP itself writes, values are read as weights are, and names of files cannot leave
the checkpoint's folder.
"""

import io
import pickle
import warnings
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_lr.checkpoints.layout import METADATA
from torchtitan_lr.compat.checkpointing import METADATA_CLASSES, set_element


class DamagedError(Exception):
    """A file of a checkpoint is not what was saved; the message names it within its folder."""


class _Unpickler(pickle.Unpickler):
    """Knows DCP's classes, torch's dtypes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Find one of the known classes, or raise a DamagedError."""
        if (module, name) in METADATA_CLASSES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.layout):
            return value
        raise DamagedError(f"{METADATA} names {module}.{name}, which no checkpoint needs")


def _enum_member(enum: Any, name: str) -> Any:
    """Return a member of an enumeration; raise a DamagedError for an attribute of anything else."""
    # Python 3.11.0 to 3.11.3 pickle a member as a getattr.
    if not (isinstance(enum, type) and issubclass(enum, Enum) and name in enum.__members__):
        raise DamagedError(f"{METADATA} names builtins.getattr, which no checkpoint needs")
    return enum[name]


def read_metadata(step_dir: str | Path) -> Metadata:
    """Read a checkpoint's table of contents; nothing of it is executed.

    Raises:
        DamagedError: It is missing, cut off, names what DCP does not write, or files elsewhere.
    """
    try:
        with open(Path(step_dir) / METADATA, "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata) or not metadata.storage_data:
            raise DamagedError(f"{METADATA} is no table of contents")
        names = {info.relative_path for info in metadata.storage_data.values()}
    except DamagedError:
        raise
    except FileNotFoundError as error:
        raise DamagedError(f"{METADATA} is missing") from error
    # A damaged pickle fails with whatever its reader stumbles over.
    except Exception as error:
        raise DamagedError(f"{METADATA} cannot be read ({describe(error)})") from error
    for name in names:
        if not isinstance(name, str) or PurePath(name).name != name:
            raise DamagedError(f"{METADATA} names a file outside its folder: {name!r}")
    return metadata


def load(
    state_dict: dict[str, Any],
    step_dir: str | Path,
    no_dist: bool = False,
    metadata: Metadata | None = None,
) -> None:
    """Load a checkpoint of DCP in place, as `torch.distributed.checkpoint.load` does, but safely.

    Args:
        state_dict: What to load; values are replaced or filled.
        step_dir: The checkpoint's folder.
        no_dist: Whether this process reads alone, without any collective.
        metadata: Its table of contents, where it has been read already.

    Raises:
        CheckpointException: It cannot be read, or does not hold these states.
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
