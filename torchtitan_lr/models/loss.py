# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The training and validation loss: cross entropy summed over tokens."""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.titan import IGNORE_INDEX, logger
from torchtitan_lr.titan.base import JobConfig, LossFunction


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of ``-log p(label)`` over the valid tokens of a batch, in nats.

    Args:
        logits: (b, s, V), a plain tensor, or a DTensor Shard(-1) in loss-parallel context; or the
            loss, a scalar, which is returned.
        labels: (b, s); positions equal to `IGNORE_INDEX` do not count.

    Returns:
        A scalar. The caller divides by the number of valid tokens of the global batch, so that
        gradients add up over ranks and micro-batches without any averaging.
    """
    # torchtitan's trainer calls the model, then the loss with the model's output and the labels.
    # The model gets the labels too, and if its head computes the loss, its output is that.
    if logits.ndim == 0:
        return logits
    # Half precision is raised to fp32; fp64 stays fp64, which upstream's loss would round.
    compute = torch.promote_types(logits.dtype, torch.float32)
    loss = F.cross_entropy(
        logits.flatten(0, 1).to(compute),
        labels.flatten(0, 1),
        reduction="sum",
        ignore_index=IGNORE_INDEX,
    )
    return loss.to_local() if isinstance(loss, DTensor) else loss


def perplexity(loss: float) -> float:
    """Return e to the loss (nats a token); infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def loss_arguments(model: nn.Module, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the model's arguments for the loss: ``targets`` (b, s) for a model of this package."""
    return {"targets": labels} if isinstance(model, LlamaModel) else {}


def build_loss(job_config: JobConfig, **kwargs: Any) -> LossFunction:
    """Build the loss: `cross_entropy_sum`, compiled if ``compile.components`` names the loss.

    Args:
        job_config: The run's configuration. Only with ``parallelism.disable_loss_parallel`` under
            tensor parallelism has a rank whole logits to compile for; else the head computes the
            loss, and this returns it.
        **kwargs: What torchtitan also passes (``parallel_dims``); unused.
    """
    compiled = job_config.compile.enable and "loss" in job_config.compile.components
    if compiled and not head_computes_loss(job_config):
        logger.info("Compiling the loss function with torch.compile")
        return torch.compile(cross_entropy_sum, backend=job_config.compile.backend)
    return cross_entropy_sum


def head_computes_loss(job_config: JobConfig) -> bool:
    """Return whether the model's output, given the targets, is the loss (`models.ends`)."""
    section = job_config.parallelism
    return not (section.disable_loss_parallel and section.tensor_parallel_degree > 1)
