# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write weights as safetensors, file by file: one file's tensors are in memory at a time."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from torchtitan_lr.checkpoints.layout import HF_INDEX
from torchtitan_lr.console.progress import progress
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs

WEIGHTS = "model.safetensors"
DEFAULT_SHARD = "5GB"

Tensors = dict[str, Tensor]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


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
        """Precision of all of them."""
        ...

    def read(self, names: Sequence[str]) -> Tensors:
        """Read tensors onto the CPU."""
        ...


@dataclass(frozen=True)
class Piece:
    """Tensors that are written from the same stored ones.

    Attributes:
        sources: Names of the stored tensors.
        convert: Makes the written tensors by name; also of meta tensors.
    """

    sources: tuple[str, ...]
    convert: Callable[[Tensors], Tensors]


def read_size(text: str) -> int:
    """Read ``--max_shard_size``.

    Args:
        text: A number of bytes, or of ``KB``, ``MB`` or ``GB`` (powers of 1000).

    Raises:
        ConfigError: It is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B|)", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ConfigError("--max_shard_size", text, "a size such as 5GB, 500MB or 1000000")
    return size


def write_shards(
    source: WeightSource,
    pieces: Iterable[Piece],
    out_dir: Path,
    dtype: torch.dtype | None = None,
    max_bytes: int = 5 * _UNITS["GB"],
) -> int:
    """Write ``model.safetensors``, or numbered files and their index where one is not enough.

    Args:
        source: The stored weights.
        pieces: What to write.
        out_dir: An existing folder.
        dtype: Precision of the files; that of the source by default.
        max_bytes: Largest size of a file's tensors; a larger tensor gets a file of its own.

    Returns:
        The number of written parameters.
    """
    dtype = dtype or source.dtype
    shards = list(_plan(source, pieces, dtype, max_bytes))
    single = len(shards) == 1
    places: dict[str, str] = {}
    count = sum(len(pieces) for pieces, _ in shards)
    done = progress(range(count), "export", count, "tensors")
    for number, (shard, names) in enumerate(shards, start=1):
        file = WEIGHTS if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        places |= dict.fromkeys(names, file)
        _save(_convert(source, shard, dtype, done), out_dir / file)
    next(done, None)  # the last one is done
    total = sum(size for _, sizes in shards for size in sizes.values())
    if not single:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(out_dir / HF_INDEX, index)
    return total // dtype.itemsize


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a dictionary, indented."""
    path.write_text(json.dumps(values, indent=2) + "\n")


def _plan(
    source: WeightSource, pieces: Iterable[Piece], dtype: torch.dtype, max_bytes: int
) -> Iterator[tuple[list[Piece], dict[str, int]]]:
    """Group pieces into files; yields the pieces of each, and bytes by written name."""
    shard: list[Piece] = []
    sizes: dict[str, int] = {}
    for piece in pieces:
        stored = {n: torch.empty(source.shapes[n], device="meta") for n in piece.sources}
        written = {n: math.prod(t.shape) * dtype.itemsize for n, t in piece.convert(stored).items()}
        if shard and sum(sizes.values()) + sum(written.values()) > max_bytes:
            yield shard, sizes
            shard, sizes = [], {}
        shard.append(piece)
        sizes |= written
    yield shard, sizes


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
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors creates a file that only its owner may read
