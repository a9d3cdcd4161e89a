# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""torchtitan's table of models, its LLaMA and its pipelines; importing it loads ``datasets``."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torchtitan.distributed.pipeline_parallel as titan_pipeline
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

# Upstream's public functions add to this table and look up one name, but cannot list or replace
# entries. If upstream moves it, importing this module fails with an AttributeError.
REGISTERED_SPECS: dict[str, Any] = train_spec._extra_train_specs
"""torchtitan's table of registered TrainSpecs by model name."""


def stages_built_by(build: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Make `pipeline_llm` build stages by ``build(part, index, stages, device, group=group)``."""
    # Upstream has no argument for the shapes at a stage's boundaries, and without them torch runs
    # the model to infer them. If upstream passes other arguments, building a stage fails with a
    # TypeError.
    return patch.object(titan_pipeline, "PipelineStage", build)
