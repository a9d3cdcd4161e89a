# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Tables of what our own code takes over from upstream: private methods, and whole steps.

A private method that a subclass overrides stays in that subclass, where it is read with the rest of
it. A step that is told again stands where ours differs from it. Neither can be a door, so both are
listed here and compared with upstream by ``tests/unit/compat/test_overrides.py``.

Seen in torch 2.11 and 2.13 and in torchtitan 0.2.2.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Override:
    """A private method of upstream that a class of ours overrides.

    If upstream renames it, ours is never called, without any error; if its arguments change, the
    first call fails.

    Args:
        ours: Module, class and method, with a colon before the class.
        upstream: The same of what is overridden.
        parameters: Names of its parameters, ``self`` aside.
        caller: What in upstream calls it, a module or a function, in the same form.
        reason: Why a public way does not do.
    """

    ours: str
    upstream: str
    parameters: tuple[str, ...]
    caller: str
    reason: str


@dataclass(frozen=True)
class Retold:
    """A function of upstream that ours says again, because it differs in the middle.

    If upstream mends or extends its own, ours does not follow by itself.

    Args:
        ours: Module and function, with a colon between them.
        upstream: The same of what is told again.
        digest: First digits of the SHA-256 of upstream's source in torchtitan 0.2.2.
        reason: What differs.
    """

    ours: str
    upstream: str
    digest: str
    reason: str


OVERRIDES = (
    Override(
        ours="torchtitan_lr.models.llama:LlamaModel._apply",
        upstream="torch.nn:Module._apply",
        parameters=("fn", "recurse"),
        caller="torch.nn:Module.to",
        reason="A cast must not round the rotary table; to, float and to_empty all end here.",
    ),
    Override(
        ours="torchtitan_lr.optim.shard_adam:ShardAdam._init_group",
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
        reason="Adam collects its tensors here; what is collected are shards from then on.",
    ),
    Override(
        ours="torchtitan_lr.parallel.pipeline.stages:Stage._get_init_p2p_neighbors_ops",
        upstream="torch.distributed.pipelining:PipelineStage._get_init_p2p_neighbors_ops",
        parameters=(),
        caller="torch.distributed.pipelining.schedules",
        reason="Before torch 2.13 a V-shaped schedule greets itself, which gloo refuses.",
    ),
    Override(
        ours="torchtitan_lr.parallel.tensor.styles:EdgeParallel._apply",
        upstream="torch.distributed.tensor.parallel:ParallelStyle._apply",
        parameters=("module", "device_mesh"),
        caller="torch.distributed.tensor.parallel.api:parallelize_module",
        reason="It is how a style of tensor parallelism is written; torch has no public name.",
    ),
    Override(
        ours="torchtitan_lr.training.checkpoint:CheckpointManager._find_load_step",
        upstream="torchtitan.components.checkpoint:CheckpointManager._find_load_step",
        parameters=("folder",),
        caller="torchtitan.components.checkpoint:CheckpointManager.load",
        reason="Upstream takes a folder with torn contents for a checkpoint.",
    ),
    Override(
        ours="torchtitan_lr.training.checkpoint:CheckpointManager._purge_stale_checkpoints",
        upstream="torchtitan.components.checkpoint:CheckpointManager._purge_stale_checkpoints",
        parameters=(),
        caller="torchtitan.components.checkpoint:CheckpointManager.save",
        reason="Upstream deletes by number; a torn folder would push a good one out.",
    ),
)

RETOLD = (
    Retold(
        ours="torchtitan_lr.training.trainer:Trainer.train_step",
        upstream="torchtitan.train:Trainer.train_step",
        digest="471795acb90b",
        reason="All ranks agree between backward and the optimizer whether the step is finite.",
    ),
    Retold(
        ours="torchtitan_lr.training.metrics:LowRankMetricsProcessor.log",
        upstream="torchtitan.components.metrics:MetricsProcessor.log",
        digest="3c99cf39c0a7",
        reason="Throughput leaves validation and saves out; MFU is absent where it is unknown.",
    ),
    Retold(
        ours="torchtitan_lr.training.validate:Validator.validate",
        upstream="torchtitan.components.validate:Validator.validate",
        digest="3c8d2dd9470e",
        reason="Upstream averages averages; ours is the mean over tokens of the whole set.",
    ),
    Retold(
        ours="torchtitan_lr.parallel.data_parallel:apply_data_parallel",
        upstream="torchtitan.models.llama3.infra.parallelize:apply_fsdp",
        digest="aac252bf68dd",
        reason="Norm and head are no common unit, and all gradients are summed.",
    ),
)
