# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Private upstream methods that our classes override, and upstream functions that we rewrite.

Neither can be wrapped by a function of ``torchtitan_lr/compat``, so both are listed here, and
``test_overrides.py`` compares them with upstream.

Tested with torch 2.11 and 2.13 and with torchtitan 0.2.2.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Override:
    """A private upstream method that ours overrides; names are ``module:class.method``."""

    ours: str
    upstream: str
    parameters: tuple[str, ...]  # without ``self``
    caller: str  # upstream's
    reason: str  # why no public API works


@dataclass(frozen=True)
class Rewrite:
    """An upstream function that ours rewrites, so that ours does not follow upstream's fixes."""

    ours: str
    upstream: str
    digest: str  # first digits of the SHA-256 of upstream's source in torchtitan 0.2.2
    reason: str  # what differs


OVERRIDES = (
    Override(
        ours="torchtitan_lr.models.llama:LlamaModel._apply",
        upstream="torch.nn:Module._apply",
        parameters=("fn", "recurse"),
        caller="torch.nn:Module.to",
        reason="A cast must not round the rotary table; to, float and to_empty all end here.",
    ),
    Override(
        ours="torchtitan_lr.optim.adam:ShardAdam._init_group",
        upstream="torch.optim:Adam._init_group",
        parameters=(
            "group",
            "params_with_grad",
            "grads",
            "exp_avgs",
            "exp_avg_sqs",
            "max_exp_avg_sqs",
            "state_steps",
        ),
        caller="torch.optim:Adam.step",
        reason="Adam collects its tensors here; the override replaces them by local shards.",
    ),
    Override(
        ours="torchtitan_lr.parallel.plan_parts:EdgeParallel._apply",
        upstream="torch.distributed.tensor.parallel:ParallelStyle._apply",
        parameters=("module", "device_mesh"),
        caller="torch.distributed.tensor.parallel.api:parallelize_module",
        reason="Tensor-parallel styles implement this method; torch has no public name for it.",
    ),
    Override(
        ours="torchtitan_lr.training.checkpoint:CheckpointManager._purge_stale_checkpoints",
        upstream="torchtitan.components.checkpoint:CheckpointManager._purge_stale_checkpoints",
        parameters=(),
        caller="torchtitan.components.checkpoint:CheckpointManager.save",
        reason="Upstream deletes by number; an incomplete folder would displace a complete one.",
    ),
)

REWRITES = (
    Rewrite(
        ours="torchtitan_lr.training.trainer:Trainer.train_step",
        upstream="torchtitan.train:Trainer.train_step",
        digest="471795acb90b",
        reason="All ranks agree between backward and the optimizer whether the step is finite.",
    ),
    Rewrite(
        ours="torchtitan_lr.training.trainer:Trainer.train",
        upstream="torchtitan.train:Trainer.train",
        digest="6d9a39ca1238",
        reason="A run stops after the step in which a signal arrives, and reports start and end.",
    ),
    Rewrite(
        ours="torchtitan_lr.training.checkpoint:CheckpointManager.load",
        upstream="torchtitan.components.checkpoint:CheckpointManager.load",
        digest="a739d1f02684",
        reason="A damaged or incomplete step is not loaded; later steps are renamed.",
    ),
    Rewrite(
        ours="torchtitan_lr.training.metrics:LowRankMetricsProcessor.log",
        upstream="torchtitan.components.metrics:MetricsProcessor.log",
        digest="3c99cf39c0a7",
        reason="Throughput excludes validation and saves; MFU is omitted if the peak is unknown.",
    ),
    Rewrite(
        ours="torchtitan_lr.training.validate:Validator.validate",
        upstream="torchtitan.components.validate:Validator.validate",
        digest="3c8d2dd9470e",
        reason="Upstream averages per-batch means; ours is the mean over all tokens of the set.",
    ),
    Rewrite(
        ours="torchtitan_lr.parallel.data_parallel:apply_data_parallel",
        upstream="torchtitan.models.llama3.infra.parallelize:apply_fsdp",
        digest="aac252bf68dd",
        reason="Norm and head are separate units, and all gradients are summed.",
    ),
)
