# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The weights of a folder of safetensors by this package's names, read tensor by tensor."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan_lr.checkpoints.folders import HF_INDEX
from torchtitan_lr.config.files import file_within, open_regular, read_json
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.shards import WEIGHTS
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import model_shapes
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tables that old versions of transformers saved."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
"""Hugging Face's names of the two weights that may be tied."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """The place of a stored tensor.

    Attributes:
        file: The file.
        name: The tensor's name in the file.
        shape: Its shape.
        dtype: Its precision in the file.
    """

    file: Path
    name: str
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class FolderWeights:
    """The weights of an export or of a Hugging Face LLaMA, read when they are needed.

    Attributes:
        args: The model's arguments.
        places: The place of each parameter, by this package's names, in the model's order.
        dtype: Precision in which they are read.
        llama: Whether the folder has Hugging Face's names and order of rotary pairs.
    """

    args: LlamaArgs
    places: dict[str, Place]
    dtype: torch.dtype
    llama: bool

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every parameter by name."""
        return {name: place.shape for name, place in self.places.items()}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read whole parameters onto the CPU.

        Raises:
            ConfigError: A file is damaged.
        """
        found: dict[str, Tensor] = {}
        for name in names:
            place = self.places[name]
            try:
                with safe_open(place.file, framework="pt") as file:
                    tensor = file.get_tensor(place.name).to(self.dtype)
            except (SafetensorError, OSError) as error:
                want = f"an undamaged file ({error})"
                raise ConfigError("DIR", str(place.file), want) from error
            if self.llama:
                # A tied head is the embedding, to the adapter too.
                theirs = HEAD if name == "output.weight" else place.name
                adapter = LlamaStateDictAdapter(self.args, None, coded=True)
                (tensor,) = adapter.from_hf({theirs: tensor}).values()
            found[name] = tensor.contiguous()
        return found


def open_folder(
    folder: Path, args: LlamaArgs, llama: bool, tied: bool = False, key: str = "DIR"
) -> FolderWeights:
    """Find every weight of a model in a folder, without reading it.

    Args:
        folder: The folder, with ``model.safetensors`` or several files and their index.
        args: The model's arguments.
        llama: Whether the names are Hugging Face's.
        tied: Whether the head is the embedding; then both get a copy of the stored tensor.
        key: The input to name in errors.

    Returns:
        The weights; their precision is that of the files, at least fp32.

    Raises:
        ConfigError: A file is missing or damaged, or a tensor is missing, of another shape,
            quantized, or not of this model.
    """
    stored = _stored(folder, key)
    check_depth(args, len(stored), key, folder)
    places: dict[str, Place] = {}
    for name, shape in model_shapes(args).items():
        theirs = name
        if llama:
            meta = {name: torch.empty(shape, device="meta")}
            (theirs,) = LlamaStateDictAdapter(args, None, coded=True).to_hf(meta)
        if tied and theirs == HEAD:
            embedding = places["tok_embeddings.weight"]
            _check_tied(embedding, stored.pop(HEAD, embedding))
            places[name] = embedding
            continue
        place = stored.pop(theirs, None)
        if place is None or place.shape != shape:
            found = None if place is None else list(place.shape)
            want = f"a tensor {theirs} of shape {list(shape)} (found: {found})"
            raise ConfigError(key, str(folder), want)
        places[name] = place
    left = [name for name in stored if not _IGNORED.fullmatch(name)]
    if left:
        want = f"the weights of a {args.model_family.model_name}, without {left[0]}"
        raise ConfigError(key, str(folder), want)
    dtype = torch.float32
    for place in places.values():
        dtype = torch.promote_types(dtype, place.dtype)
    return FolderWeights(args, places, dtype, llama)


def weight_files(folder: Path, key: str = "DIR") -> list[Path]:
    """List the files of a folder's weights, for every command that reads them.

    Returns:
        ``model.safetensors`` if it is there, as transformers prefers it, else those of the index.

    Raises:
        ConfigError: No file is found, the index is damaged, or one of its files is missing.
    """
    for file in folder.glob("*.safetensors"):  # under torchrun DCP opens all of them
        _check_regular(file, key)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    index = folder / HF_INDEX
    if not index.is_file():
        want = f"a folder with {WEIGHTS} or {HF_INDEX}"
        if any(folder.glob("*.bin")):
            want += "; transformers' save_pretrained writes it for a model of .bin files"
        raise ConfigError(key, str(folder), want)
    try:
        names = set(read_json(file_within(folder, HF_INDEX))["weight_map"].values())
        files = [folder / Path(name).name for name in sorted(names)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(key, str(index), f"an undamaged index ({error})") from error
    for file in files:
        if not file.is_file():
            raise ConfigError(key, str(folder), f"all files of {HF_INDEX}: {file.name} is missing")
    return files


def check_depth(args: LlamaArgs, tensors: int, key: str, folder: Path) -> None:
    """Refuse more blocks than stored tensors, before a model of so many is built.

    Raises:
        ConfigError: A block has more than one tensor.
    """
    if args.n_layers > tensors:
        want = f"the weights of {args.n_layers} blocks, not {tensors} tensors"
        raise ConfigError(key, str(folder), want)


def _check_regular(file: Path, key: str) -> None:
    """Refuse a pipe or a device; a link to weights elsewhere is usual, and gives nothing else."""
    try:
        with open_regular(file, sys.maxsize):
            pass
    except OSError as error:
        want = f"a file of weights that can be read ({error.strerror})"
        raise ConfigError(key, str(file), want) from error


def _stored(folder: Path, key: str) -> dict[str, Place]:
    """Read the headers of the files."""
    places: dict[str, Place] = {}
    for path in weight_files(folder, key):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (it is no dictionary)
                    piece = file.get_slice(name)
                    dtype = _DTYPES.get(piece.get_dtype())
                    if dtype is None:
                        want = f"floating-point weights in {path.name}; {name} is something else"
                        raise ConfigError(key, piece.get_dtype(), want)
                    places[name] = Place(path, name, tuple(piece.get_shape()), dtype)
        except (SafetensorError, OSError) as error:
            want = f"a whole file of safetensors ({str(error).splitlines()[0]})"
            raise ConfigError(key, str(path), want) from error
    return places


def _check_tied(embedding: Place, head: Place) -> None:
    """Refuse a stored head where the configuration ties it: readers disagree on such models."""
    if head is embedding:
        return
    tensors = []
    for place in (embedding, head):
        with safe_open(place.file, framework="pt") as file:
            tensors.append(file.get_tensor(place.name))
    if not torch.equal(*tensors):
        want = f"false: {head.file} has an {HEAD} that differs from the embedding"
        raise ConfigError("tie_word_embeddings", True, want)
