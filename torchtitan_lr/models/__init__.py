# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Models on one device: four families of LLaMA in one code path."""

from torchtitan_lr.models.args import FAMILIES, Family, LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS, FlavorTable
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter

__all__ = [
    "FAMILIES",
    "FLAVORS",
    "FlavorTable",
    "LlamaArgs",
    "LlamaModel",
    "LlamaStateDictAdapter",
    "model_name",
    "model_table",
]


def model_name(family: Family) -> str:
    """Name under which a family is registered with torchtitan, e.g. ``llama_cola``."""
    return f"llama_{family}"


def model_table(family: Family) -> FlavorTable:
    """Flavors of a family, for ``TrainSpec.model_args``."""
    return FLAVORS[family]
