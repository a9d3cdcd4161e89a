# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A discarded step leaves every bit as it was, and its micro-batches are taken again.

One replica alone is the quorum; its collectives fail one after the other, each in an attempt of its
own. What is committed must be the run of the plain trainer.
"""

import copy
import json
import os
import random
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.unit.tiny_trainer import MODEL, OPTIONS
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.training.history import HISTORY_FILE, read_history
from torchtitan_lr.training.trainer import Trainer

pytest.importorskip("torchft", reason="torchft is not installed (the extra `ft`)")

from tests.support.lighthouse import lighthouse
from torchtitan_lr.experiments.replicas.state import digest
from torchtitan_lr.experiments.replicas.trainer import ReplicaTrainer

pytestmark = pytest.mark.nightly

STEPS = 5
PLAIN, REFRESH, VOTE = 2, 3, 4
"""Steps whose collectives fail, the second of which refreshes the bases; one whose vote fails.

The step after them is undisturbed: it follows a committed attempt, whose gradients are still there.
"""

TSR = (
    "--optimizer.name=TSRAdam",
    "--optimizer.lr=1e-2",
    "--optimizer.tsr_rank=2",
    "--optimizer.tsr_embedding_rank=2",
    "--optimizer.tsr_refresh_interval=2",
    "--optimizer.tsr_embedding_refresh_interval=2",
    "--training.global_batch_size=4",  # two micro-batches
    f"--training.steps={STEPS}",
)


class CutTrainer(ReplicaTrainer):
    """Its collectives fail: in the n-th attempt of a step the n-th, and once the vote."""

    def __init__(self, config):
        super().__init__(config)
        self.states, self.batches, self.calls = {}, {}, {}
        self.commits = 0

    def everything(self):
        """A copy of all that a discarded step must leave as it was."""
        return {
            "weights": [p.detach().clone() for p in self.model_parts[0].parameters()],
            "optimizer": copy.deepcopy([o.state_dict() for o in self.optimizers]),
            "schedule": copy.deepcopy(self.lr_schedulers.state_dict()),
            "data": self._positions.state_dict(),
            "train": self.state_dict() | {"step": self._members.committed},
            "logged": self.metrics_processor.ntokens_since_last_log,
            "rng": [torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())],
        }

    def _try(self, data_iterator):
        self.states.setdefault(self.step, []).append(self.everything())
        group, attempt = self._members.group, len(self.states[self.step]) - 1
        allreduce, self.calls[self.step] = group.allreduce, 0

        def cut(tensors, options):
            if self.step in (PLAIN, REFRESH) and self.calls[self.step] == attempt:
                group.report_error(RuntimeError("cut"))
                tensors[0].fill_(99.0)  # what a failed sum may leave
            self.calls[self.step] += 1
            return allreduce(tensors, options)

        with patch.object(group, "allreduce", cut):
            found = super()._try(data_iterator)
        if self.step == VOTE and not attempt:
            group.report_error(RuntimeError("cut before the vote"))
        return found

    def _forward_backward(self, microbatches, tokens):
        self.batches.setdefault(self.step, []).append(digest([list(pair) for pair in microbatches]))
        return super()._forward_backward(microbatches, tokens)


@contextmanager
def trainer_of(kind, folder, *options):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    trainer = None
    try:
        with patch.dict(os.environ, environment), patch.dict(FLAVORS["svd"].data, debug=MODEL):
            config = build_job_config([*OPTIONS, *TSR, f"--job.dump_folder={folder}", *options])
            check_job_config(config, 1, "cpu")
            trainer = kind(config)
            yield trainer
    finally:
        if trainer is not None:
            trainer.close()
        dist.destroy_process_group()


def train(trainer):
    iterator = trainer.batch_generator(trainer.dataloader)
    while trainer.should_continue_training():
        trainer.step += 1
        trainer.train_step(iterator)
    return [p.detach().clone() for p in trainer.model_parts[0].parameters()]


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """The run whose collectives fail, its commits, and the plain trainer's run."""
    folder = tmp_path_factory.mktemp("discarded")
    with trainer_of(Trainer, folder / "plain") as trainer:
        expected = train(trainer), read_history(folder / "plain" / HISTORY_FILE)
    with lighthouse("127.0.0.1:0", 1, 5.0, 2.0) as address:
        options = [
            "--job.custom_config_module=torchtitan_lr.experiments.replicas.job_config",
            "--fault_tolerance.enable",
            "--fault_tolerance.group_size=1",
            "--fault_tolerance.min_replica_size=1",
            f"--fault_tolerance.lighthouse=127.0.0.1:{address.rpartition(':')[2].strip('/')}",
        ]
        with trainer_of(CutTrainer, folder / "cut", *options) as trainer:
            found = train(trainer)
            return trainer, found, read_history(folder / "cut/replica_0/commits.jsonl"), expected


def test_every_collective_of_a_step_failed_once(cut):
    trainer, _, commits, _ = cut
    discarded = {record["step"]: record["discarded"] for record in commits}
    assert list(discarded) == list(range(1, STEPS + 1))
    assert discarded == {step: len(trainer.states[step]) - 1 for step in discarded}
    for step in (PLAIN, REFRESH):
        assert discarded[step] == trainer.calls[step] > 2
    assert discarded[1] == discarded[STEPS] == 0 and discarded[VOTE] == 1
    plans = [plan for stack in next(iter(trainer.optimizers)).stacks for plan in stack.plans]
    assert all(plan.is_due(REFRESH - 1, 1) and not plan.is_due(PLAIN - 1, 1) for plan in plans)


def test_a_discarded_step_leaves_every_bit(cut):
    trainer = cut[0]
    for step, states in trainer.states.items():
        assert {json.dumps(digests(state)) for state in states} == {json.dumps(digests(states[0]))}
        if step > 1:  # a committed one changes each of these
            before, after = digests(trainer.states[step - 1][0]), digests(states[0])
            same = {name for name in before if before[name] == after[name]}
            assert same <= {"rng", "logged"}


def digests(state):
    return {name: digest(value) for name, value in state.items()}


def test_its_micro_batches_are_taken_again(cut):
    batches = cut[0].batches
    assert all(len(set(attempts)) == 1 for attempts in batches.values())
    assert len({attempts[0] for attempts in batches.values()}) == STEPS


def test_what_is_committed_is_the_plain_run(cut):
    _, weights, commits, (expected, history) = cut
    for record, there in zip(commits, history, strict=True):
        assert record["loss"] == pytest.approx(there["loss_metrics/global_avg_loss"], rel=1e-6)
        assert record["norm"] == pytest.approx(there["grad_norm"], rel=1e-5)
    for found, right in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
