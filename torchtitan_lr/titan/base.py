# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What ``import torchtitan`` loads in 2 to 4 s: configuration, meshes, tokenizers, types."""

from typing import Any

from torch.nn.attention.flex_attention import BlockMask as BlockMask
from torchtitan.components.loss import LossFunction as LossFunction
from torchtitan.components.tokenizer import BaseTokenizer as BaseTokenizer
from torchtitan.config import TORCH_DTYPE_MAP as TORCH_DTYPE_MAP
from torchtitan.config import JobConfig as JobConfig
from torchtitan.config import Optimizer
from torchtitan.config.job_config import ActivationCheckpoint as ActivationCheckpoint
from torchtitan.distributed import ParallelDims as ParallelDims
from torchtitan.distributed import activation_checkpoint, utils
from torchtitan.distributed.activation_checkpoint import apply_ac as apply_ac
from torchtitan.models.attention import FlexAttentionWrapper
from torchtitan.models.attention import create_attention_mask as create_attention_mask
from torchtitan.protocols import BaseModelArgs as BaseModelArgs
from torchtitan.protocols import ModelProtocol as ModelProtocol
from torchtitan.tools.utils import GarbageCollection as GarbageCollection
from torchtitan.tools.utils import set_default_dtype as set_default_dtype

# A name of our own is no re-export to mypy.
dist_utils, OptimizerConfig = utils, Optimizer

flex_attention = FlexAttentionWrapper()
"""torch's ``flex_attention``, compiled as torchtitan does: tuned, or with ``debug.deterministic``
not. Inside of a compiled block it becomes a part of the block's graph."""


def mesh_of(parallel_dims: Any, name: str) -> Any:
    """Return a mesh dimension of any size; the public ``get_mesh`` raises for size 1."""
    # A model without data parallelism is wrapped over a group of one, see `apply_data_parallel`.
    # Reads ``ParallelDims._meshes``, which ``world_mesh`` fills as a side effect. If upstream fills
    # it elsewhere, this raises a KeyError or an AttributeError before the first step.
    parallel_dims.world_mesh  # noqa: B018  (builds the meshes)
    return parallel_dims._meshes[name]


def count_checkpointed_blocks_from(first: int) -> None:
    """Reset the counter of blocks by which ``selective_ac_option`` checkpoints every n-th."""
    # Upstream counts blocks in a module variable, ``_layer_sac_count``, across all models of a
    # process, including a second pipeline stage and rehearsed models. If upstream renames it,
    # writing it has no effect; this function's test fails first.
    activation_checkpoint._layer_sac_count = first


def drop_marker(values: dict[str, Any]) -> dict[str, Any]:
    """Return a model's arguments without ``_enforced``, by which torchtitan requires defaults."""
    # If upstream adds another marker, it appears in exported files, and a test fails.
    return {key: value for key, value in values.items() if key != "_enforced"}
