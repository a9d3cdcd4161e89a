# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The one place that orders what is done to a model before it trains.

Each family has a parallelize function of its own name, which says what its plans split; all of them
call the same order.
"""

from typing import cast

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.data_parallel import apply_data_parallel
from torchtitan_lr.parallel.recompute.activation_checkpoint import (
    apply_activation_checkpoint,
    compiles_model,
)
from torchtitan_lr.parallel.tensor.tensor_parallel import apply_tensor_parallel, settings_for


def parallelize_llama(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Apply tensor parallelism, checkpointing, compilation and data parallelism, in this order.

    Args:
        model: On the meta device; the whole model or one pipeline stage.
        parallel_dims: Degrees and meshes.
        job_config: The run's configuration.

    Returns:
        The same module, wrapped in place.
    """
    if parallel_dims.tp_enabled:
        args = cast(LlamaArgs, model.model_args)
        settings = settings_for(job_config, args, parallel_dims.tp)
        apply_tensor_parallel(model, parallel_dims.get_mesh("tp"), settings)
    apply_activation_checkpoint(model, job_config)
    if compiles_model(job_config):
        apply_compile(model, job_config.compile.backend)
    apply_data_parallel(model, parallel_dims, job_config)
    return model


def parallelize_llama_full(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Parallelize dense linears: the plan ``megatron``, with lanes ``caat``."""
    return parallelize_llama(model, parallel_dims, job_config)


def parallelize_llama_svd(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Parallelize B A x: ``btp``, ``vanilla``, ``vanilla_replicated``; with lanes ``btp_caat``."""
    return parallelize_llama(model, parallel_dims, job_config)


def parallelize_llama_cola(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Parallelize B σ(A x): the plans of llama_svd; σ acts on whole sums A x, so it stays local."""
    return parallelize_llama(model, parallel_dims, job_config)


def parallelize_llama_lax(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Parallelize B (A x + g · A' x'): the plans of llama_svd without lanes.

    Their edge ``mix`` adds the latents A' x' of the previous block, which also cross pipeline
    stages.
    """
    return parallelize_llama(model, parallel_dims, job_config)


def apply_compile(model: nn.Module, backend: str) -> None:
    """Compile each decoder block by itself: equal blocks share one compilation.

    Args:
        model: The model, already wrapped for checkpointing.
        backend: A ``torch.compile`` backend.
    """
    layers = model.get_submodule("layers")
    for name, block in layers.named_children():
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        layers.register_module(name, cast(nn.Module, compiled))
    logger.info("Compiling each decoder block with torch.compile")
