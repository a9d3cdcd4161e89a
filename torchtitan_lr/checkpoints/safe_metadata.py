# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Reading a checkpoint without running what it says.

DCP's ``.metadata`` is a pickle, and so are the values beside the tensors; a pickle can name any
function and have it called. Upstream reads both without a restriction. Here ``.metadata`` may name
the classes that DCP writes and nothing else, values are read as weights are, and names of files
cannot leave the checkpoint's folder.
"""

import io
import pickle
import sys
import warnings
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from torchtitan_lr.checkpoints.folders import METADATA
from torchtitan_lr.checkpoints.record import DamagedError, describe
from torchtitan_lr.compat.checkpointing import METADATA_CLASSES, set_element
from torchtitan_lr.config.files import read_regular

_MOST_BYTES = 1 << 31  # of a table of contents; one of a thousand ranks has some hundred megabytes


class _Unpickler(pickle.Unpickler):
    """Finds the classes of a table of contents alone, and imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class, or a dtype or layout of torch."""
        if (module, name) in METADATA_CLASSES:
            # Paths may be of another Python, or of another system.
            return Path if module.startswith("pathlib") else vars(sys.modules[module])[name]
        if (module, name) == ("builtins", "getattr"):
            return _member
        value = vars(torch).get(name) if module == "torch" else None
        if isinstance(value, torch.dtype | torch.layout):
            return value
        raise DamagedError(f"{METADATA} names {module}.{name}, which no checkpoint needs")


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration; Python 3.11.0 to 3.11.3 pickle it as a getattr."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise DamagedError(f"{METADATA} takes {name} of what is no enumeration")
    return kind[name]


def read_metadata(step_dir: str | Path) -> Metadata:
    """Read a checkpoint's table of contents, or raise a DamagedError; nothing of it is executed."""
    try:
        data = read_regular(Path(step_dir) / METADATA, _MOST_BYTES)
        metadata = _Unpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata) or not metadata.storage_data:
            raise DamagedError(f"{METADATA} is no table of contents")
        for info in metadata.storage_data.values():
            name = info.relative_path
            if name in ("", ".", "..") or PurePath(name).name != name:
                raise DamagedError(f"{METADATA} names a file outside its folder: {name!r}")
    except DamagedError:
        raise
    # A damaged one fails with whatever its reader stumbles over.
    except Exception as error:
        raise DamagedError(f"{METADATA} cannot be read ({describe(error)})") from error
    return metadata


def load(
    state_dict: dict[str, Any], step_dir: str | Path, metadata: Metadata | None = None
) -> None:
    """Load a checkpoint of DCP in place, as `torch.distributed.checkpoint.load` does, but safely.

    ``metadata`` is what `read_metadata` has returned already.
    """
    alone = not dist.is_initialized()
    with warnings.catch_warnings():
        if alone:  # DCP warns that it runs without a process group
            warnings.simplefilter("ignore")
        reader = _Reader(step_dir)
        reader.contents = metadata
        dcp.load(state_dict, storage_reader=reader, planner=_Planner(), no_dist=alone)


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
