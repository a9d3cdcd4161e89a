# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's table of models and its LLaMA; importing it loads ``datasets``."""

from typing import Any

from torchtitan.components.validate import BaseValidator as BaseValidator
from torchtitan.components.validate import ValidationContext as ValidationContext
from torchtitan.models.llama3.model.args import RoPEScalingArgs as RoPEScalingArgs
from torchtitan.models.llama3.model.state_dict_adapter import (
    Llama3StateDictAdapter as Llama3StateDictAdapter,
)
from torchtitan.protocols import train_spec
from torchtitan.protocols.train_spec import ParallelizeFunction as ParallelizeFunction
from torchtitan.protocols.train_spec import TrainSpec as TrainSpec
from torchtitan.protocols.train_spec import get_train_spec as get_train_spec
from torchtitan.protocols.train_spec import register_train_spec as register_train_spec


def registered_specs() -> dict[str, Any]:
    """Return the table (not a copy) of registered TrainSpecs by model name.

    Upstream's public functions add to ``train_spec._extra_train_specs`` and look up one name, but
    cannot list or replace entries. If upstream moves the table, registration fails with an
    AttributeError.
    """
    table: dict[str, Any] = train_spec._extra_train_specs
    return table
