# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write weights as safetensors, file by file: one file's tensors are in memory at a time."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from torchtitan_lr.checkpoints.folders import HF_INDEX
from torchtitan_lr.console.progress import progress
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs

WEIGHTS = "model.safetensors"
DEFAULT_SHARD = "5GB"

Tensors = dict[str, Tensor]


class WeightSource(Protocol):
    """Weights by this package's names, read when they are needed."""

    @property
    def args(self) -> LlamaArgs:
        """The model's arguments."""
        ...

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by name, in the model's order."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Precision of all tensors."""
        ...

    def read(self, names: Sequence[str]) -> Tensors:
        """Read tensors onto the CPU."""
        ...


@dataclass(frozen=True)
class Piece:
    """One tensor to write.

    Attributes:
        sources: Names of the stored tensors that it is made of.
        convert: Makes the written tensor, by its name; also of meta tensors.
    """

    sources: tuple[str, ...]
    convert: Callable[[Tensors], Tensors]


def write_shards(
    source: WeightSource,
    pieces: Iterable[Piece],
    out_dir: Path,
    dtype: torch.dtype | None = None,
    max_size: str = DEFAULT_SHARD,
) -> int:
    """Write ``model.safetensors``, or numbered files and their index where one is not enough.

    One file's tensors are in memory at a time; `huggingface_hub` decides which go together.

    Args:
        source: The stored weights.
        pieces: The tensors to write.
        out_dir: An existing folder.
        dtype: Precision of the files; by default the source's.
        max_size: Largest size of a file's tensors, such as ``5GB`` or a number of bytes; a larger
            tensor gets a file of its own.

    Returns:
        The number of written parameters.

    Raises:
        ConfigError: The size is none.
    """
    dtype = dtype or source.dtype
    by_name: dict[str, Piece] = {}
    written: Tensors = {}
    for piece in pieces:
        stored = {
            name: torch.empty(source.shapes[name], dtype=dtype, device="meta")
            for name in piece.sources
        }
        (name, tensor) = next(iter(piece.convert(stored).items()))
        by_name[name], written[name] = piece, tensor.to(dtype)
    plan = plan_shards(written, max_size)
    done = progress(range(len(written)), "export", len(written), "tensors")
    for file, names in plan.filename_to_tensors.items():
        tensors = _convert(source, [by_name[name] for name in names], dtype, done)
        _save(tensors, out_dir / file)
    next(done, None)  # the last one is done
    total = int(plan.metadata["total_size"])
    if plan.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": plan.tensor_to_filename}
        write_json(out_dir / HF_INDEX, index)
    return total // dtype.itemsize


def plan_shards(tensors: Tensors, max_size: str) -> StateDictSplit:
    """Distribute tensors over files, as transformers names them.

    Raises:
        ConfigError: The size is none.
    """
    size: int | str = int(max_size) if max_size.isdecimal() else max_size
    try:
        if size == 0 or re.match(r"0+[A-Z]", max_size.upper()):
            raise ValueError
        return split_torch_state_dict_into_shards(
            tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=size
        )
    except ValueError as error:
        want = "a size such as 5GB, 500MB or 1000000"
        raise ConfigError("--max_shard_size", max_size, want) from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a dictionary, indented."""
    path.write_text(json.dumps(values, indent=2) + "\n")


def _convert(
    source: WeightSource, shard: list[Piece], dtype: torch.dtype, done: Iterator[int]
) -> Tensors:
    stored = source.read([name for piece in shard for name in piece.sources])
    tensors: Tensors = {}
    for piece in shard:
        next(done, None)
        # Taken out one by one, so that stored and written tensors are not all there at once.
        written = piece.convert({name: stored.pop(name) for name in piece.sources})
        tensors |= {name: value.to(dtype).contiguous() for name, value in written.items()}
    return tensors


def _save(tensors: Tensors, path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # an error of the system, such as a full disk
        raise OSError(str(error)) from error
    path.chmod(mode)  # safetensors creates a file that only its owner may read
