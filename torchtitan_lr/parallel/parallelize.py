# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The parallelize function of all families, which torchtitan calls for every model part."""

from typing import cast

import torch
from torch import nn

from torchtitan_lr.compat.dispatch import remake_inputs_of_products
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.ends import errors_in_place
from torchtitan_lr.models.one_device import OutputProjection
from torchtitan_lr.parallel.checkpoint_modes import (
    apply_activation_checkpoint,
    compiles_model,
    keeps_inputs,
)
from torchtitan_lr.parallel.context import apply_context_parallel, context_ranks
from torchtitan_lr.parallel.data_parallel import apply_data_parallel
from torchtitan_lr.parallel.plans import apply_tensor_parallel, tp_settings
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig, ParallelDims


def parallelize_llama(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Apply the run's plan, then context parallelism and what follows, in this order."""
    # The model is on the meta device, whole or one pipeline stage.
    if parallel_dims.tp_enabled:
        settings = tp_settings(job_config, cast(LlamaArgs, model.model_args), parallel_dims.tp)
        logger.info(f"Tensor parallelism over {parallel_dims.tp} ranks: {settings}")
        apply_tensor_parallel(model, parallel_dims.get_mesh("tp"), settings)
    if parallel_dims.cp_enabled:
        gather = job_config.parallelism.cp_gather
        apply_context_parallel(model, context_ranks(parallel_dims), gather)
    apply_activation_checkpoint(model, job_config)
    keeps = keeps_inputs(job_config.activation_checkpoint)
    if keeps:
        logger.info("Inputs of products are kept for backward")
    if compiles_model(job_config):
        apply_compile(model, job_config.compile.backend, keeps)
    output, compiles = model.output, job_config.compile
    if isinstance(output, OutputProjection) and compiles.enable and "loss" in compiles.components:
        # What the head computes between the loss's two products.
        output.errors = torch.compile(errors_in_place, backend=compiles.backend, dynamic=False)
    apply_data_parallel(model, parallel_dims, job_config)
    return model


def apply_compile(model: nn.Module, backend: str, keeps: bool = False) -> None:
    """Compile each decoder block by itself: equal blocks share one compilation."""
    # At full rank inputs are always kept: the latents that low rank keeps beside are not there.
    remake_inputs_of_products(cast(LlamaArgs, model.model_args).low_rank and not keeps)
    layers = model.get_submodule("layers")
    for name, block in layers.named_children():
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        layers.register_module(name, cast(nn.Module, compiled))
    logger.info("Compiling each decoder block with torch.compile")
