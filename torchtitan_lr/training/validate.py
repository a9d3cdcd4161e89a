# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Validation: the exact token-weighted mean loss over a fixed set of sequences.

torchtitan averages per batch, which weights a short batch like a full one.
"""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lr.console.log import console
from torchtitan_lr.console.progress import progress
from torchtitan_lr.data.corpus import ValidationSet, moved
from torchtitan_lr.data.prepare import open_rows
from torchtitan_lr.errors import require
from torchtitan_lr.models.llama import loss_arguments
from torchtitan_lr.parallel.context import context_ranks, own_tokens
from torchtitan_lr.parallel.data_parallel import fsdp_modules
from torchtitan_lr.parallel.stages import Pipeline
from torchtitan_lr.titan import IGNORE_INDEX, base
from torchtitan_lr.titan.components import MetricsProcessor
from torchtitan_lr.titan.device import device_type
from torchtitan_lr.titan.specs import BaseValidator, ValidationContext
from torchtitan_lr.training.history import UNIGRAM_ENTROPY, VALIDATION_SECONDS, perplexity


@torch.no_grad()
def sum_over_ranks(
    model_parts: list[nn.Module],
    batches: Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]],
    loss_fn: base.LossFunction,
    pipeline: Pipeline | None,
    parallel_dims: base.ParallelDims,
) -> tuple[float, float]:
    """Sum the loss over all valid tokens of all ranks.

    Batches are ``({"input": (b, s), ...}, labels (b, s))``, as many on every rank; ignored labels
    do not count. Context-parallel ranks have the same rows, of which each computes its tokens.
    """
    for model in model_parts:
        model.eval()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device_type())
    num_tokens = torch.zeros_like(loss_sum)
    context = context_ranks(parallel_dims)
    for rows in batches:
        batch = own_tokens(rows, context)
        num_tokens += (batch[1] != IGNORE_INDEX).sum().item()
        tokens, labels, arguments = moved(batch, device_type())
        arguments |= loss_arguments(model_parts[0], labels)
        if pipeline is not None:
            loss_sum += pipeline.evaluate(tokens, labels, **arguments)
        else:
            loss_sum += loss_fn(model_parts[0](tokens, **arguments), labels)
    mesh = parallel_dims.get_optional_mesh("loss")
    # Only the last stage has a loss; every stage has the labels.
    if (stages := parallel_dims.get_optional_mesh("pp")) is not None:
        dist.all_reduce(loss_sum, group=stages.get_group())
    total = base.dist_utils.dist_sum(num_tokens, mesh)
    loss = base.dist_utils.dist_sum(loss_sum, mesh)
    for model in model_parts:
        model.train()
    for module in fsdp_modules(model_parts):
        module.reshard()  # a pipeline keeps weights unsharded until backward
    return loss, total


class Validator(BaseValidator):
    """Runs the model over this rank's share of the validation set, as ``[validation]`` says."""

    def __init__(
        self,
        job_config: base.JobConfig,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: base.BaseTokenizer,
        parallel_dims: base.ParallelDims,
        loss_fn: base.LossFunction,
        validation_context: ValidationContext,
        maybe_enable_amp: AbstractContextManager[None],
        metrics_processor: MetricsProcessor,
        pp_schedule: Pipeline | None = None,
        **_: bool | None,  # which stages this rank has; the schedule knows it
    ) -> None:
        super().__init__(job_config)
        self.parallel_dims = parallel_dims
        self.loss_fn = loss_fn
        self.validation_context = validation_context
        self.maybe_enable_amp = maybe_enable_amp
        self.metrics_processor = metrics_processor
        self.pipeline = pp_schedule
        section = job_config.validation
        sizes = section.local_batch_size, dp_world_size, dp_rank, section.steps
        self.validation_set = ValidationSet(open_rows(job_config, "validation"), *sizes)
        self._entropy: float | None = None
        # torchtitan's own section has no such key.
        self._first_step = getattr(section, "first_step", False)
        self.last_loss: float | None = None  # nats per token
        self.suspended = False

    def should_validate(self, step: int) -> bool:
        """Validate every ``validation.freq`` steps and after the last; see ``first_step``."""
        due = super().should_validate(step) or step == self.job_config.training.steps
        if step == 1 and not self._first_step:
            # Upstream always validates after step 1, where the model is still untrained.
            due = 1 in (self.job_config.validation.freq, self.job_config.training.steps)
        return due and not self.suspended

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Compute and log the validation loss and perplexity."""
        started = time.perf_counter()
        first = dist.get_rank() == 0
        if self._entropy is None and self.job_config.compile.enable:
            console.info("The first validation compiles the model once more, for no gradients")
        batches = progress(self.validation_set, "validation", len(self.validation_set), shown=first)
        with self.validation_context(), self.maybe_enable_amp:
            loss_sum, total = sum_over_ranks(
                model_parts, batches, self.loss_fn, self.pipeline, self.parallel_dims
            )
        section = self.job_config.validation
        want = "a corpus with labels in its first batches: every one here is ignored"
        require(total, "validation.dataset", section.dataset, want)
        self.last_loss = loss_sum / total
        if self._entropy is None:
            # Each rank counts its own rows, once. Context-parallel ranks count the same ones, which
            # changes no share. A trained model's loss must be below the
            # entropy: it is the loss of the best model without context.
            model: Any = model_parts[0]
            counts = torch.zeros(model.model_args.vocab_size, dtype=torch.int64)
            for _, labels in self.validation_set:
                counts += torch.bincount(labels[labels != IGNORE_INDEX], minlength=len(counts))
            counts = counts.to(device_type())
            if (mesh := self.parallel_dims.get_optional_mesh("loss")) is not None:
                dist.all_reduce(counts, group=mesh.get_group())
            shares = counts.double() / counts.sum()
            self._entropy = float(torch.special.entr(shares).sum())
        self.metrics_processor.log_validation(
            self.last_loss,
            step,
            extra_metrics={
                "validation_metrics/perplexity": perplexity(self.last_loss),
                "validation_metrics/tokens": total,
                UNIGRAM_ENTROPY: self._entropy,
                VALIDATION_SECONDS: time.perf_counter() - started,
            },
        )
