# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The training and validation loss: cross entropy summed over tokens."""

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from torchtitan_lr.titan import IGNORE_INDEX, logger
from torchtitan_lr.titan.base import JobConfig, LossFunction


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of ``-log p(label)`` over the valid tokens of a batch, in nats.

    Half-precision logits are raised to fp32; fp64 logits stay fp64, which upstream's loss
    would round.

    Args:
        logits: `(b, s, V)`, a plain tensor, or a DTensor `Shard(-1)` in loss-parallel context.
        labels: `(b, s)`; positions equal to `IGNORE_INDEX` do not count.

    Returns:
        A scalar. The caller divides by the number of valid tokens of the global batch, so that
        gradients add up over ranks and micro-batches without any averaging.
    """
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


class HeadLoss:
    """The loss of a model whose head computes it, so that whole logits never exist.

    torchtitan's trainer calls the model, then the loss with the model's output and the labels. This
    loss gives the model the labels first, and the model's output is the loss.

    Attributes:
        takes_targets: Whether the model needs the labels.
    """

    takes_targets = True

    def __call__(self, prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the prediction, a scalar; of logits (b, s, V), `cross_entropy_sum`."""
        return cross_entropy_sum(prediction, labels) if prediction.ndim else prediction


def loss_arguments(loss_fn: LossFunction, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the model's arguments for a loss: ``targets`` (b, s) if the head computes it."""
    return {"targets": labels} if getattr(loss_fn, "takes_targets", False) else {}


def build_loss(job_config: JobConfig, **kwargs: Any) -> LossFunction:
    """Build the loss; the head computes it unless logits are gathered over the ranks.

    Args:
        job_config: The run's configuration. With ``parallelism.disable_loss_parallel`` under tensor
            parallelism every rank has whole logits; then ``compile.components`` may name the loss.
        **kwargs: What torchtitan also passes (``parallel_dims``); unused.
    """
    section = job_config.parallelism
    if not (section.disable_loss_parallel and section.tensor_parallel_degree > 1):
        return HeadLoss()
    if job_config.compile.enable and "loss" in job_config.compile.components:
        logger.info("Compiling the loss function with torch.compile")
        return torch.compile(cross_entropy_sum, backend=job_config.compile.backend)
    return cross_entropy_sum
