# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's table of models, its LLaMA and its pipelines; importing it loads ``datasets``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torchtitan.distributed.pipeline_parallel as titan_pipeline
from torch import nn
from torchtitan.components.validate import BaseValidator as BaseValidator
from torchtitan.components.validate import ValidationContext as ValidationContext
from torchtitan.distributed.pipeline_parallel import (
    generate_llm_fqn_per_model_part as generate_llm_fqn_per_model_part,
)
from torchtitan.distributed.pipeline_parallel import pipeline_llm as pipeline_llm
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
    """Return the table (not a copy) of registered TrainSpecs by model name."""
    # Upstream's public functions add to ``train_spec._extra_train_specs`` and look up one name, but
    # cannot list or replace entries. If upstream moves the table, registration fails with an
    # AttributeError.
    table: dict[str, Any] = train_spec._extra_train_specs
    return table


@contextmanager
def stages_built_by(
    build: Callable[[nn.Module, int], Any], stages: int, device: torch.device, group: Any
) -> Iterator[None]:
    """Make torchtitan's `pipeline_llm` build its stages with ``build``.

    ``PipelineStage`` in torchtitan's module is replaced. Its call is ``PipelineStage(part, index,
    stages, device, group=group)`` in torchtitan 0.2.2; ``build`` gets the part of the model and the
    index.

    Raises:
        TypeError: Upstream passes an unknown argument, which ``build`` would ignore.
        RuntimeError: Upstream's number of stages, device or group differs from the expected one.
    """
    # Upstream has no argument for the shapes at a stage's boundaries, and without them torch runs
    # the model to infer them.

    def stage(*args: Any, **named: Any) -> Any:
        if len(args) != 4 or named.keys() != {"group"}:
            raise TypeError(
                "torchtitan builds a PipelineStage of arguments that torchtitan_lr.titan.specs "
                f"does not know: {len(args)} by position instead of 4, {sorted(named)} by name "
                "instead of ['group']"
            )
        part, index, *rest = args
        if rest != [stages, device] or named["group"] is not group:
            raise RuntimeError(
                f"torchtitan builds a stage of {rest[0]} on {rest[1]}, expected {stages} on "
                f"{device} and the group of the pipeline"
            )
        return build(part, index)

    with patch.object(titan_pipeline, "PipelineStage", stage):
        yield
