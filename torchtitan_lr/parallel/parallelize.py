# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The parallelize functions of the families, which torchtitan calls for every model part.

Each emits its family's plan by ``parallelize_module``: for every module the placements of its
parameters, and its edges. What follows is the same for all, in one order (`finish`).
"""

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from torchtitan_lr.compat.compiler import remake_inputs_of_products
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.ends import Head, errors_in_place
from torchtitan_lr.parallel.context import apply_context_parallel, context_ranks
from torchtitan_lr.parallel.data_parallel import apply_data_parallel
from torchtitan_lr.parallel.plans import build_tp_plan, check_placed, tp_settings
from torchtitan_lr.parallel.recompute import apply_activation_checkpoint, compiles_model
from torchtitan_lr.titan import logger
from torchtitan_lr.titan.base import JobConfig, ParallelDims


def parallelize_llama_full(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Parallelize W x: q, k, v, gate and up column-parallel, o and down row-parallel.

    By ``megatron``, with lanes by ``caat``. For the arguments see `finish`.
    """
    if parallel_dims.tp_enabled:
        mesh, plan = tensor_parallel_plan(model, parallel_dims, job_config)
        parallelize_module(model, mesh, plan, src_data_rank=None)
    return finish(model, parallel_dims, job_config)


def parallelize_llama_svd(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Parallelize B A x: A row- and B column-parallel (``btp``), or the reverse (``vanilla``).

    Low-rank families from outside the package have this function too. For the arguments see
    `finish`.
    """
    if parallel_dims.tp_enabled:
        mesh, plan = tensor_parallel_plan(model, parallel_dims, job_config)
        parallelize_module(model, mesh, plan, src_data_rank=None)
    return finish(model, parallel_dims, job_config)


def parallelize_llama_cola(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Parallelize B σ(A x) as B A x.

    The edges that apply B apply σ too. They have whole latents (``btp``) or some of their features
    (``vanilla``), never a term of a sum, so σ sends nothing.
    """
    return parallelize_llama_svd(model, parallel_dims, job_config)


def parallelize_llama_lax(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> nn.Module:
    """Parallelize B_i σ(A_i x_i + g · A_j x_j), where block j = i - 1, as B σ(A x).

    The plans have an edge for the addition (`MixEdge`): A_j x_j has the layout of A_i x_i, also
    where it crosses pipeline stages (`plans.stage_boundary`).
    """
    return parallelize_llama_svd(model, parallel_dims, job_config)


def tensor_parallel_plan(
    model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig
) -> tuple[DeviceMesh, dict[str, ParallelStyle]]:
    """Return the mesh of the tensor-parallel ranks, and the styles of the run's plan."""
    settings = tp_settings(job_config, cast(LlamaArgs, model.model_args), parallel_dims.tp)
    logger.info(f"Tensor parallelism over {parallel_dims.tp} ranks: {settings}")
    return parallel_dims.get_mesh("tp"), build_tp_plan(model, settings)


def finish(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Apply context parallelism, checkpointing, compilation and data parallelism, in this order.

    Args:
        model: On the meta device; the whole model or one pipeline stage.
        parallel_dims: Degrees and meshes.
        job_config: The run's configuration.
    """
    if parallel_dims.tp_enabled:
        check_placed(model)
    if parallel_dims.cp_enabled:
        gather = job_config.parallelism.cp_gather
        apply_context_parallel(model, context_ranks(parallel_dims), gather)
    apply_activation_checkpoint(model, job_config)
    if compiles_model(job_config):
        apply_compile(model, job_config.compile.backend)
    if job_config.compile.enable and "loss" in job_config.compile.components:
        compile_loss(model, job_config.compile.backend)
    apply_data_parallel(model, parallel_dims, job_config)
    return model


def apply_compile(model: nn.Module, backend: str) -> None:
    """Compile each decoder block by itself: equal blocks share one compilation."""
    # At full rank it costs time, and the latents that low rank keeps beside are not there.
    remake_inputs_of_products(cast(LlamaArgs, model.model_args).low_rank)
    layers = model.get_submodule("layers")
    for name, block in layers.named_children():
        compiled = torch.compile(block, backend=backend, fullgraph=True)
        layers.register_module(name, cast(nn.Module, compiled))
    logger.info("Compiling each decoder block with torch.compile")


def compile_loss(model: nn.Module, backend: str) -> None:
    """Compile what the head computes between the loss's two products."""
    for head in model.modules():
        if isinstance(head, Head):
            head.errors = torch.compile(errors_in_place, backend=backend, dynamic=False)
