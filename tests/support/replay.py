# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Train the committed steps of replicas that came and went again, in one process.

The commit logs say who took part in each step, and hence which micro-batches it had. One process
without replicas takes the same ones: the independent check of sums, rescaling and healing.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data.dataloader import build_dataloader
from torchtitan_lr.replicas.commits import COMMITS_FILE, read_commits
from torchtitan_lr.training.history import HISTORY_FILE, TRAIN_LOSS, read_history
from torchtitan_lr.training.trainer import Trainer


@dataclass(frozen=True)
class Commits:
    """What the logs of all replicas say together.

    Attributes:
        steps: One record per committed step, in order.
        unequal: Steps at whose end two replicas had different digests.
        twice: ``(part, index)`` of the data that were used in two steps.
    """

    steps: list[dict[str, Any]]
    unequal: list[int]
    twice: list[tuple[int, int]]


def merge_commits(folder: Path) -> Commits:
    """Read the logs of all replicas below a dump folder.

    Args:
        folder: ``job.dump_folder``.
    """
    logs = [read_commits(path) for path in sorted(folder.glob(f"replica_*/{COMMITS_FILE}"))]
    by_step: dict[int, list[dict[str, Any]]] = {}
    for record in (record for log in logs for record in log):
        by_step.setdefault(record["step"], []).append(record)
    steps = [by_step[step][0] for step in sorted(by_step)]
    same = ("replicas", "taken", "tokens", "digest")
    unequal = [
        step
        for step, records in sorted(by_step.items())
        if any(record[key] != records[0][key] for record in records for key in same)
    ]
    used = [(part, record["taken"][part]) for record in steps for part in record["replicas"]]
    twice = sorted({place for place in used if used.count(place) > 1})
    return Commits(steps, unequal, twice)


def replay(arguments: Sequence[str], steps: Sequence[dict[str, Any]], folder: Path) -> list[float]:
    """Train committed steps in this process.

    Args:
        arguments: The command line of a replica, without its id.
        steps: ``Commits.steps``, from step 1 on.
        folder: A new dump folder.

    Returns:
        The loss of each step, in nats per token.
    """
    overrides = (
        "--fault_tolerance.no_enable",
        "--validation.no_enable",
        "--checkpoint.no_enable",
        "--metrics.log_freq=1",
        f"--job.dump_folder={folder}",
    )
    parts = build_job_config(list(arguments)).fault_tolerance.group_size
    config = build_job_config([*arguments, *overrides])
    with _one_rank():
        check_job_config(config, 1, "cpu")
        trainer = Trainer(config)
        try:
            _train(trainer, steps, parts)
        finally:
            trainer.close()
    return [record[TRAIN_LOSS] for record in read_history(folder / HISTORY_FILE)]


def _train(trainer: Trainer, steps: Sequence[dict[str, Any]], parts: int) -> None:
    assert trainer.tokenizer is not None
    loaders = [
        build_dataloader(
            dp_world_size=parts,
            dp_rank=part,
            tokenizer=trainer.tokenizer,
            job_config=trainer.job_config,
        )
        for part in range(parts)
    ]
    streams = [iter(loader) for loader in loaders]
    each = loaders[0].microbatches
    for record in steps:
        trainer.step = record["step"]
        members = record["replicas"]
        trainer.gradient_accumulation_steps = each * len(members)
        trainer.train_step(next(streams[part]) for part in members for _ in range(each))
    for loader in loaders:
        loader.close()


@contextmanager
def _one_rank() -> Iterator[None]:
    """Make this process the only rank of a run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        dist.destroy_process_group()
