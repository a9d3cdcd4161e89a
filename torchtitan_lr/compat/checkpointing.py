# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torch's distributed checkpoints (DCP) from inside: what their tables of contents name.

Seen in torch 2.11 and 2.13.
"""

from torch.distributed.checkpoint._nested_dict import set_element

__all__ = ["METADATA_CLASSES", "set_element"]
# set_element: puts a value into nested dictionaries and lists by its path, as DCP's own planner
# does when it loads. If it moves, the import fails; if its arguments change, loading an optimizer's
# or a trainer's values fails.

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
"""Everything that DCP pickles into ``.metadata``, by module and name: plain values need no name.

A pickle can name any function and have it called, so `torchtitan_lr.checkpoints.safe_metadata`
reads these classes and no others. DCP does not publish them. If upstream writes another class, a
new checkpoint is refused when it is loaded, and the refusal names that class.
"""
