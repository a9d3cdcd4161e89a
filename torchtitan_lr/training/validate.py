# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Validation: the exact token-weighted mean loss over fixed sets of sequences.

torchtitan averages per batch, which weights a short batch like a full one.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lr.console.terminal import progress
from torchtitan_lr.data.corpus import Batch, ValidationSet, moved
from torchtitan_lr.data.dataloader import ended
from torchtitan_lr.data.prepare import open_rows, validation_sets
from torchtitan_lr.errors import require
from torchtitan_lr.models.llama import loss_arguments
from torchtitan_lr.parallel.context import context_ranks, own_tokens
from torchtitan_lr.parallel.data_parallel import fsdp_modules
from torchtitan_lr.parallel.stages import Pipeline
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.titan.base import JobConfig, LossFunction, ParallelDims, dist_utils
from torchtitan_lr.titan.components import MetricsProcessor
from torchtitan_lr.titan.device import device_type
from torchtitan_lr.titan.specs import BaseValidator, ValidationContext
from torchtitan_lr.training.history import perplexity


class Validator(BaseValidator):
    """Runs the model over this rank's share of each validation set, as ``[validation]`` says."""

    def __init__(
        self,
        job_config: JobConfig,
        dp_world_size: int,
        dp_rank: int,
        parallel_dims: ParallelDims,
        loss_fn: LossFunction,
        validation_context: ValidationContext,
        metrics_processor: MetricsProcessor,
        pp_schedule: Pipeline | None = None,
        **_: Any,  # more that torchtitan passes: tokenizer, autocast, which stages this rank has
    ) -> None:
        super().__init__(job_config)
        self.parallel_dims = parallel_dims
        self.loss_fn = loss_fn
        self.validation_context = validation_context
        self.metrics_processor = metrics_processor
        self.pipeline = pp_schedule
        self.sets: dict[str, ValidationSet] = {}  # by the keys of their tables
        for key, each in validation_sets(job_config).items():
            sizes = job_config.validation.local_batch_size, dp_world_size, dp_rank, each.steps
            self.sets[key] = ValidationSet(open_rows(job_config, key), *sizes)
        self.last_loss: float | None = None  # of ``[validation]``'s own set, nats per token
        self.stopping: Callable[[], bool] = lambda: False  # whether a signal has come
        self.cut = False  # whether a rank's read had not ended when the run was stopped
        self._thread = ThreadPoolExecutor(1)

    def should_validate(self, step: int) -> bool:
        """Validate every ``validation.freq`` steps and after the last."""
        # Upstream always validates after step 1, where the model is still untrained.
        config = self.job_config
        return step % config.validation.freq == 0 or step == config.training.steps

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Compute and log the loss and perplexity of each set, unless one is ``cut``."""
        found: dict[str, dict[str, float]] = {}
        for key, each in validation_sets(self.job_config).items():
            started = time.perf_counter()
            with self.validation_context():
                loss_sum, total, entropy = self._summed(model_parts, self.sets[key])
            if self.cut:
                return
            want = "a corpus with labels in its first batches: every one here is ignored"
            require(total, f"{key}.dataset", each.dataset, want)
            loss = loss_sum / total
            numbers = {"loss": loss, "perplexity": perplexity(loss), "tokens": total}
            seconds = time.perf_counter() - started
            found[each.name] = {**numbers, "unigram_entropy": entropy, "seconds": seconds}
        self.last_loss = found[""]["loss"]
        self.metrics_processor.log_validations(step, found)

    @torch.no_grad()
    def _summed(
        self, model_parts: list[nn.Module], rows_of: ValidationSet
    ) -> tuple[float, float, float]:
        """Sum the loss over all valid tokens of all ranks; return it, their number and entropy."""
        for model in model_parts:
            model.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=device_type())
        vocabulary: Any = model_parts[0].model_args
        counts = torch.zeros(vocabulary.vocab_size, dtype=torch.int64)  # of each label
        context, length = context_ranks(self.parallel_dims), len(rows_of)
        batches = self._batches(rows_of)
        if dist.get_rank() == 0:
            batches = progress(batches, "validation", length)
        for rows in batches:
            batch = own_tokens(rows, context)  # of rows (b, s) that context-parallel ranks share
            counts += torch.bincount(batch[1][batch[1] != IGNORE_INDEX], minlength=len(counts))
            tokens, labels, arguments = moved(batch, device_type())
            arguments |= loss_arguments(model_parts[0], labels)
            if self.pipeline is not None:
                loss_sum += self.pipeline.evaluate(tokens, labels, **arguments)
            else:
                loss_sum += self.loss_fn(model_parts[0](tokens, **arguments), labels)
        for model in model_parts:
            model.train()
        for module in fsdp_modules(model_parts):
            module.reshard()  # a pipeline keeps weights unsharded until backward
        cut = torch.full_like(loss_sum, float(self.cut))
        self.cut = dist_utils.dist_sum(cut, self.parallel_dims.world_mesh) > 0
        # Only the last stage has a loss; every stage has the labels.
        if (stages := self.parallel_dims.get_optional_mesh("pp")) is not None:
            dist.all_reduce(loss_sum, group=stages.get_group())
        counts = counts.to(device_type())
        if (mesh := self.parallel_dims.get_optional_mesh("loss")) is not None:
            dist.all_reduce(counts, group=mesh.get_group())
        total = counts.sum()
        # The loss of the best model without context: a trained one's must be below it.
        entropy = torch.special.entr(counts.double() / total).sum()
        return dist_utils.dist_sum(loss_sum, mesh), float(total), float(entropy)

    def _batches(self, rows_of: ValidationSet) -> Iterator[Batch]:
        """Yield the batches; ignored ones behind a read that is cut, as other ranks wait."""
        batches = iter(rows_of)
        for _ in range(len(rows_of)):
            if not self.cut:
                read = self._thread.submit(next, batches)
                self.cut = not ended(read, self.stopping)
            yield rows_of.ignored() if self.cut else read.result()
