# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Read exports in both formats, and other LLaMA models of Hugging Face's format."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from torchtitan_lr.config.files import read_json
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.export import CODED_TYPE, HF_CONFIG, build_coded_config
from torchtitan_lr.hf.folder_weights import FolderWeights, open_folder
from torchtitan_lr.hf.read_llama import build_args, read_llama_args
from torchtitan_lr.models.args import ACTIVATIONS, LlamaArgs
from torchtitan_lr.models.configured import empty_model
from torchtitan_lr.models.flavors import MODEL_ARGS, read_model_args
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter
from torchtitan_lr.titan.components import ModelWrapper


def is_export(folder: Path) -> bool:
    """Return whether a folder holds an export rather than a checkpoint."""
    return any((folder / name).is_file() for name in (MODEL_ARGS, HF_CONFIG))


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
    args = read_export_args(folder)
    llama = is_llama(folder)
    tied = llama and read_llama_args(folder / HF_CONFIG)[1]
    return open_folder(folder, args, llama, tied, key), tied


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
    adapter = LlamaStateDictAdapter(read_export_args(folder), None)
    renamed = is_llama(folder)
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

    Returns:
        The model's arguments; what does not change its function has its default.

    Raises:
        ConfigError: The file is missing, or describes a model that this package cannot compute.
    """
    if (folder / MODEL_ARGS).is_file():
        return read_model_args(folder / MODEL_ARGS)
    path = folder / HF_CONFIG
    try:
        values = read_json(path)
        if values["model_type"] != CODED_TYPE:
            return read_llama_args(path)[0]
        own = {name: values[name] for name in ("lax_gate", "lanes", "sync_fraction")}
        own |= {name: values[name] for name in ("rank_attention", "rank_ffn")}
        rotary = values["rotary_base"], values["rotary_scaling"]
        for activation in ACTIVATIONS:
            kind = own | {"activation": activation}
            try:
                args = build_args(values, *rotary, values["family"], kind)
            except ConfigError as error:
                if error.key != "low_rank.activation":
                    raise
                continue  # the family does not have this one
            coded = build_coded_config(args, torch.float32)
            if all(coded[name] == values[name] for name in ("latent_silu", "outer_silu")):
                return args
        raise ValueError("unknown places of the nonlinearities")
    except ConfigError:
        raise
    except (OSError, ValueError, ArithmeticError, TypeError, KeyError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(str(path), why, "what `export` wrote") from error


def is_llama(folder: Path) -> bool:
    """Return whether the weights have the names and the layout of transformers' LLaMA."""
    path = folder / HF_CONFIG
    if (folder / MODEL_ARGS).is_file() or not path.is_file():
        return False
    try:
        return read_json(path).get("model_type") == "llama"
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), str(error), "the configuration of a model") from error
