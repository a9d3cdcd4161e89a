# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Private parts of torch's distributed checkpoints (DCP); tested with torch 2.11 and 2.13."""

from itertools import product

# Sets a value in nested dictionaries and lists by its path, as DCP's load planner does.
from torch.distributed.checkpoint._nested_dict import set_element as set_element

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

A pickle can call any function, so `torchtitan_lr.checkpoints.safe_metadata` allows only these. DCP
does not publish them. If upstream writes another class, loading a new checkpoint raises an error
that names the class.
"""
