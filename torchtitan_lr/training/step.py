# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One training step after another, each in eight parts. docs/step.md tells a step on a page.

1. ``take`` receives this rank's micro-batches. All but a process's first were read before.
2. ``backward`` runs forward and backward of each micro-batch.
3. ``finish_sums`` waits for the sums of gradients, and computes this rank's share of the norm.
4. ``read_ahead`` collects the next step's micro-batches while the device computes.
5. ``decide`` is one all-reduce: the verdict, which accepts or rejects the step.
6. ``clip`` scales the gradients down.
7. ``apply`` steps the optimizer. A rejected step changes no weight.
8. ``settle`` reads the verdict on the host.

`Trainer.train_step` calls them in this order. Between ``take`` and ``settle`` the host does not
wait for the device, unless an optimizer cannot read the verdict there (`step_unless`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_lr.agreement import first_rank_where, first_rank_with
from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.compat.process_groups import least_of_all
from torchtitan_lr.compression.compressor import Compressor
from torchtitan_lr.data.corpus import Batch
from torchtitan_lr.optim.gradients import StoredGradients
from torchtitan_lr.parallel.data_parallel import OwnGradients, synchronize_gradients
from torchtitan_lr.parallel.stages import Pipeline
from torchtitan_lr.titan.base import JobConfig
from torchtitan_lr.titan.components import OptimizersContainer
from torchtitan_lr.training.reader import Counts, StepData, StepReader
from torchtitan_lr.training.step_graph import Capture, StepGraph
from torchtitan_lr.training.verdict import Depth, Findings, Verdict

_IN_THE_LOSS, _NEVER = 1 << 40, 1 << 41
"""Stand for a depth behind every block's, and for that of a rank where all is finite."""


@dataclass(kw_only=True)
class Step:
    """The running step of a rank; its methods are called on every rank."""

    job_config: JobConfig  # the run's configuration; a step reads ``[training]``
    device: torch.device  # this rank's device
    model_parts: Sequence[nn.Module]  # the pipeline stages of this rank (one without pipelining)
    pipeline: Pipeline | None  # runs the stages; None without pipelining
    optimizers: OptimizersContainer  # one per model part
    gradients: StoredGradients  # of all parts; or what the optimizer has in its place
    reader: StepReader  # reads this rank's data
    # Those of ``[grad_compression]``; a step keeps or discards their residuals
    compressors: Sequence[Compressor]
    before_change: Callable[[], None]  # called before weights, moments and residuals change
    capture: Capture | None = None  # records the passes of micro-batches; None runs them eagerly
    data: StepData = field(init=False)  # this step's data
    # This rank's share of the step's loss, an fp64 scalar on the device
    loss: Tensor = field(init=False)
    share: Tensor = field(init=False)  # this rank's share of the squared gradient norm, likewise
    # This rank's counts of the next step's data; empty if none were read
    next_counts: tuple[float, ...] = field(init=False)
    verdict: Verdict = field(init=False)  # the ranks' common decision on the step, on the device

    def __post_init__(self) -> None:
        self._own_gradients = OwnGradients(self.model_parts)
        self.graph: StepGraph | None = None
        if self.capture is not None:
            self.graph = StepGraph(self.model_parts, self._own_gradients, self.capture)
        shares_rows = self.job_config.parallelism.context_parallel_degree > 1
        self._depth: Depth | None = None
        if shares_rows or self.pipeline is not None:
            self._depth = Depth(self.model_parts, shares_rows, self.device)

    def take(self, data_iterator: Iterator[Batch]) -> StepData:
        """Receive this step's ``({"input": (b, s)}, labels (b, s))``, which were read before."""
        self.optimizers.zero_grad()
        self.data = self.reader.take(data_iterator)
        return self.data

    def backward(self, forward_backward: Callable[..., Tensor], eager: bool = False) -> None:
        """Run forward and backward of each micro-batch, and accumulate the gradients.

        The loss of a micro-batch is its summed token loss divided by the valid tokens of the global
        batch. So the gradients sum to those of one process with the same batch. `forward_backward`
        runs one micro-batch and returns this rank's share of the loss.
        """

        def one_pass(labels: Tensor, tokens: Tensor, **inputs: Tensor) -> Tensor:
            return forward_backward(
                input_dict=inputs, labels=labels, global_valid_tokens=tokens
            ).detach()

        self.gradients.begin()
        if self.graph is not None:
            self.graph.begin(shapes_of(self.data.microbatches), eager)
        self._own_gradients.clear()
        if self._depth is not None:
            self._depth.clear()
        # Filled on the device: `torch.tensor` would stop the host until its copy has arrived.
        tokens = torch.full((), self.data.global_tokens, device=self.device)
        losses = []
        for index, (input_dict, labels) in enumerate(self.data.microbatches):
            last = index == len(self.data.microbatches) - 1
            synchronize_gradients(self.model_parts, last)
            if self.pipeline is not None:  # which synchronizes itself, at the end of its batch
                self.pipeline.is_last_round = last
            inputs = {name: self._moved(tensor) for name, tensor in input_dict.items()}
            inputs |= {"labels": self._moved(labels), "tokens": tokens}
            with self.gradients.micro_batch(last):
                if self.graph is None:
                    losses.append(one_pass(**inputs))
                else:
                    losses.append(self.graph.run(one_pass, inputs, index == 0, last))
        # Sum in float64 on every rank: stages without the loss return a zero of another dtype.
        self.loss = torch.stack(losses).sum(dtype=torch.float64)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def finish_sums(self) -> None:
        """Wait for sums of gradients that still run; compute this rank's share of the norm."""
        self.share = self.gradients.finish_sums()

    def read_ahead(self, data_iterator: Iterator[Batch] | None) -> None:
        """Collect the next step's micro-batches, while the device computes."""
        self.next_counts = ()
        if data_iterator is not None:
            self.next_counts = self.reader.read_next(data_iterator).counts

    def decide(self, stop: bool) -> None:
        """Let all ranks accept or reject the step, and say whether they could read ahead."""
        depth = None if self._depth is None else self._depth.least
        self.verdict = Verdict.all_reduced(self.loss, self.share, stop, self.next_counts, depth)

    def clip(self) -> None:
        """Scale the gradients down to ``training.max_norm``."""
        self.gradients.clip(self.job_config.training.max_norm, self.verdict.norm)

    def apply(self) -> None:
        """Let the optimizer change the weights, unless the verdict rejects the step."""
        self.before_change()
        step_unless(self.verdict.rejected, self.optimizers)
        may_skip = self.job_config.training.max_skipped_steps > 0
        for compressor in self.compressors:
            compressor.commit(self.verdict.rejected if may_skip else None)

    def settle(self) -> Findings:
        """Read the verdict on the host, which waits for it but not for the optimizer."""
        findings = self.verdict.read()
        self.reader.next_sums = Counts(*findings.next_counts) if findings.next_counts else None
        self.gradients.settle(findings.rejected)
        return findings

    def fault(self, findings: Findings) -> tuple[str, int | None]:
        """Return why a step was rejected, and the rank; call it on every rank, before the next."""
        if not self.data.global_tokens:  # 0/0: the weights are not the cause
            return "the global batch has no valid label (all are ignored)", None
        if findings.bad_ranks:
            own = findings.depth
            if math.isinf(own):
                own = _NEVER if findings.loss_is_finite else _IN_THE_LOSS
            least = least_of_all(int(own))
            rank = first_rank_where(own == least)
            what = "loss" if least == _IN_THE_LOSS else f"output of block {least}"
            return f"{what} of rank {rank} is not finite", rank
        where, rank = self._where_not_finite()
        return f"gradient norm is {findings.norm} ({where})", rank

    def _where_not_finite(self) -> tuple[str, int | None]:
        """Return whose backward made a gradient that is not finite, in words and as a rank.

        A NaN spreads against the order of the layers: the last parameter that has one is nearest to
        its origin. Tensor-parallel ranks share sums, so the first is named. Call it on every rank.
        """
        parts, stages = {0: self.model_parts[0]}, 1
        if self.pipeline is not None:
            parts, stages = self.pipeline.parts, self.pipeline.stages
        sources = [("", self.gradients.nonfinite)]
        if self._own_gradients.watching:  # what is left are sums over the ranks: a rank's own first
            sources = [
                ("", self._own_gradients.nonfinite),
                ("only in the sum over the ranks, ", self.gradients.nonfinite),
            ]
        for kind, nonfinite in sources:
            for stage in reversed(range(stages)):
                names = nonfinite(parts[stage]) if stage in parts else []
                if at := first_rank_with(names[-1] if names else None):
                    rank, name = at
                    return f"{kind}rank {rank}: {name}", rank
        return "every entry is finite, but the squares overflow", None


def shapes_of(microbatches: Iterable[Batch]) -> tuple[Any, ...]:
    """Return the shapes of a step's tensors on this rank."""
    return tuple(
        (*((name, tensor.shape) for name, tensor in inputs.items()), labels.shape)
        for inputs, labels in microbatches
    )


def step_unless(rejected: Tensor, optimizers: OptimizersContainer) -> None:
    """Step all optimizers, unless the step is rejected.

    The verdict is passed as torch's `GradScaler` does, in ``found_inf``. Fused Adam and optimizers
    with ``takes_verdict`` then change nothing without a read of the host. For torch's others, and
    weights that are offloaded, the host reads the verdict.
    """
    parts: list[Any] = list(optimizers)
    if not all(_reads_found_inf(part, rejected.device) for part in parts):
        if not rejected.item():
            optimizers.step()
        return
    for part in parts:
        part.found_inf = rejected
    try:
        optimizers.step()
    finally:
        for part in parts:
            del part.found_inf


def _reads_found_inf(optimizer: Any, device: torch.device) -> bool:
    """Return whether an optimizer reads ``found_inf`` on a device."""
    if getattr(optimizer, "takes_verdict", False):
        return True
    for group in optimizer.param_groups:
        if not group.get("fused", False):
            return False
        if any(local_part(parameter).device != device for parameter in group["params"]):
            return False
    return True
