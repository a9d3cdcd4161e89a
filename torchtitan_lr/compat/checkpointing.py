# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Private parts of torch's distributed checkpoints (DCP): nested values and metadata classes.

Tested with torch 2.11 and 2.13.
"""

# Sets a value in nested dictionaries and lists by its path, as DCP's load planner does.
from torch.distributed.checkpoint._nested_dict import set_element as set_element

METADATA_CLASSES = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *(
            (module, name)
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
        ),
    }
)
"""Classes that DCP pickles into ``.metadata``, by module and name.

A pickle can call any function, so `torchtitan_lr.checkpoints.safe_metadata` allows only these
classes. DCP does not publish them. If upstream writes another class, loading a new checkpoint
raises an error that names the class.
"""
