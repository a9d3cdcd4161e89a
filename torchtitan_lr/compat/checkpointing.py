# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Private parts of torch's distributed checkpoints (DCP); tested with torch 2.11 and 2.13."""

from itertools import product
from pathlib import PurePath
from types import NoneType

import torch

# Sets a value in nested dictionaries and lists by its path, as DCP's load planner does.
from torch.distributed.checkpoint._nested_dict import set_element as set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

_METADATA = "torch.distributed.checkpoint.metadata"
_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")

METADATA_CLASSES = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *product(("pathlib", "pathlib._local"), _PATHS),
    }
)
"""What DCP pickles into ``.metadata``, by module and name.

A pickle can call any function, so `torchtitan_lr.checkpoints.safe_metadata` allows only these, and
of their instances only the `METADATA_FIELDS`. DCP does not publish them. If upstream writes another
class, loading a new checkpoint raises an error that names the class.
"""

METADATA_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    Metadata: {
        "state_dict_metadata": (dict,),
        "planner_data": (dict, NoneType),
        "storage_data": (dict, NoneType),
        "storage_meta": (StorageMeta, NoneType),
        "version": (str, NoneType),
    },
    TensorStorageMetadata: {
        "properties": (TensorProperties,),
        "size": (torch.Size,),
        "chunks": (list,),
    },
    ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    BytesStorageMetadata: {},
    MetadataIndex: {"fqn": (str,), "offset": (torch.Size, NoneType), "index": (int, NoneType)},
    StorageMeta: {
        "checkpoint_id": (str, PurePath, NoneType),
        "save_id": (str, NoneType),
        "load_id": (str, NoneType),
        "modules": (list,),
    },
    StorageInfo: {
        "relative_path": (str,),
        "offset": (int,),
        "length": (int,),
        "transform_descriptors": (list, NoneType),
    },
}
"""The attributes that instances of DCP's classes may get from a pickle, with their types."""

PROPERTIES = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
"""Types of the state of a pickled `TensorProperties`, which converts it by itself."""
