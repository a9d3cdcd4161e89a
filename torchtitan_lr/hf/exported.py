# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Read exports in both formats, and other LLaMA models of Hugging Face's format."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.export import HF_CONFIG
from torchtitan_lr.hf.folder_weights import FolderWeights, open_folder
from torchtitan_lr.hf.read_llama import read_llama_args
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.configured import empty_model
from torchtitan_lr.models.flavors import MODEL_ARGS, read_model_args
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter
from torchtitan_lr.titan.components import ModelWrapper


def is_export(folder: Path) -> bool:
    """Return whether a folder holds an export rather than a checkpoint."""
    return any((folder / name).is_file() for name in (MODEL_ARGS, HF_CONFIG))


def has_our_names(folder: Path) -> bool:
    """Return whether an export's weights have this package's names, not those of LLaMA."""
    return (folder / MODEL_ARGS).is_file()


def open_source(folder: Path, key: str = "DIR") -> tuple[FolderWeights, bool]:
    """Open a folder of weights.

    Args:
        folder: A Hugging Face LLaMA, or an export of either format.
        key: The input to name in errors.

    Returns:
        The weights, and whether embedding and head are tied in the folder.

    Raises:
        ConfigError: The folder has no such model, or one that this package cannot compute.
    """
    if not folder.is_dir() or not is_export(folder):
        want = f"a folder with {HF_CONFIG} (a Hugging Face LLaMA) or {MODEL_ARGS} (an export)"
        raise ConfigError(key, str(folder), want)
    if has_our_names(folder):
        return open_folder(folder, read_model_args(folder / MODEL_ARGS), False, False, key), False
    args, tied = read_llama_args(folder / HF_CONFIG)
    return open_folder(folder, args, True, tied, key), tied


def load_export(folder: Path) -> LlamaModel:
    """Load an export onto the CPU.

    Returns:
        The model in the export's dtype, in evaluation mode.

    Raises:
        ConfigError: A file is missing or damaged, or describes another model.
    """
    source = open_source(folder, "CHECKPOINT")[0]
    source = replace(source, dtype=source.places["tok_embeddings.weight"].dtype)
    model = empty_model(source.args).to(source.dtype).to_empty(device="cpu")
    for name, tensor in model.state_dict().items():
        tensor.copy_(source.read([name])[name])
    return model.eval()


def export_dtype(folder: Path) -> torch.dtype:
    """Return the precision of an export's weights.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    return open_source(folder, "CHECKPOINT")[0].places["norm.weight"].dtype


def fill_from_export(folder: Path, model: ModelWrapper) -> None:
    """Read an export into a model that is split over ranks; every rank reads its own shards.

    Raises:
        ConfigError: A file is missing or damaged, or holds another model.
    """
    adapter = LlamaStateDictAdapter(read_export_args(folder), None, coded=True)
    renamed = not has_our_names(folder)
    if renamed and read_llama_args(folder / HF_CONFIG)[1]:
        want = "a model with a head of its own under torchrun; `torchtitan-lr import` makes it one"
        raise ConfigError("CHECKPOINT", str(folder), want)
    state = model.state_dict()
    stored = adapter.to_hf(state) if renamed else dict(state)
    try:
        dcp.load(stored, storage_reader=adapter.get_hf_storage_reader(str(folder)))
    # CheckpointException derives from BaseException.
    except (Exception, CheckpointException) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError("CHECKPOINT", str(folder), f"an undamaged export ({why})") from error
    model.load_state_dict(adapter.from_hf(stored) if renamed else stored)


def read_export_args(folder: Path) -> LlamaArgs:
    """Read what an export says about its model.

    Raises:
        ConfigError: The file is missing, or describes a model that this package cannot compute.
    """
    if has_our_names(folder):
        return read_model_args(folder / MODEL_ARGS)
    return read_llama_args(folder / HF_CONFIG)[0]
