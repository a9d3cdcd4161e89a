# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The parallelize functions of the families: tensor parallelism to FSDP, in one order."""

from typing import cast

import torch
from torch import nn

from torchtitan_lr.compat.compiler import remake_inputs_of_products
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.parallel.data_parallel import apply_data_parallel
from torchtitan_lr.parallel.plans import apply_tensor_parallel, tp_settings
from torchtitan_lr.parallel.recompute import apply_activation_checkpoint, compiles_model
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig, ParallelDims


def parallelize_llama(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Apply tensor parallelism, checkpointing, compilation and data parallelism, in this order.

    Args:
        model: On the meta device; the whole model or one pipeline stage.
        parallel_dims: Degrees and meshes.
        job_config: The run's configuration.
    """
    if parallel_dims.tp_enabled:
        args = cast(LlamaArgs, model.model_args)
        settings = tp_settings(job_config, args, parallel_dims.tp)
        apply_tensor_parallel(model, parallel_dims.get_mesh("tp"), settings)
    apply_activation_checkpoint(model, job_config)
    if compiles_model(job_config):
        apply_compile(model, job_config.compile.backend)
    apply_data_parallel(model, parallel_dims, job_config)
    return model


parallelize_llama_full = parallelize_llama
"""Splits dense linears by the plan ``megatron``, with lanes by ``caat``."""

parallelize_llama_svd = parallelize_llama
"""Splits B A x by ``btp`` or ``vanilla``."""

parallelize_llama_cola = parallelize_llama
"""Splits B σ(A x) as B A x: σ acts on complete sums A x, so it needs no communication."""

parallelize_llama_lax = parallelize_llama
"""Splits B σ(A x + g · A' x') by ``btp`` or ``vanilla``; the plans' edge ``mix`` adds the latents
A' x' of the previous block, which also cross pipeline stages."""


def apply_compile(model: nn.Module, backend: str) -> None:
    """Compile each decoder block by itself: equal blocks share one compilation."""
    # At full rank it costs time, and the latents that low rank keeps beside are not there.
    remake_inputs_of_products(cast(LlamaArgs, model.model_args).low_rank)
    layers = model.get_submodule("layers")
    for name, block in layers.named_children():
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        layers.register_module(name, cast(nn.Module, compiled))
    logger.info("Compiling each decoder block with torch.compile")
