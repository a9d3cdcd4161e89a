# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas train like one process with their rows (fp64), whoever leaves, joins and writes."""

import os
import re
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.training import known_setup
from tests.support import parity_runs
from tests.support.parity_runs import EXACT, largest_difference
from tests.support.rank_pool import RankPool
from torchtitan_lr.training.history import read_history

pytest.importorskip("torchft", reason="torchft is not installed (the extra `ft`)")

MODEL = [
    "--model.name=llama_cola",
    "--training.steps=4",  # a refresh between plain steps
    "--training.global_batch_size=12",  # of three replicas
    "--optimizer.name=TSRAdam",
    "--optimizer.tsr_rank=12",
    "--optimizer.tsr_refresh_interval=2",
    "--optimizer.tsr_embedding_rank=8",
    "--optimizer.tsr_embedding_refresh_interval=3",
]
LAYOUTS = {
    "shards": ["--training.local_batch_size=2"],
    "tensor": ["--training.local_batch_size=4", "--parallelism.tensor_parallel_degree=2"],
}
GROUP_SIZE = 3
EXTENSION = "torchtitan_lr.experiments.replicas.job_config"


def train_replica(arguments: list[str], folder: str, build: Any = None) -> dict[str, Any]:
    import torchtitan.train as titan_train

    from torchtitan_lr.experiments.replicas.trainer import ReplicaTrainer
    from torchtitan_lr.training import history

    no_rest = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    with (
        patch.object(titan_train, "time", no_rest),
        patch.object(history, "draw_curve"),
        known_setup(),
    ):
        return parity_runs.train(arguments, folder, build=build or ReplicaTrainer)


def rows_of(parts: dict[int, list[int]], config: Any) -> Any:
    """Build a trainer whose steps have the rows of some of `GROUP_SIZE` parts.

    Args:
        parts: From each of these steps on.
        config: Of one process.
    """
    from torchtitan_lr.data.dataloader import build_dataloader
    from torchtitan_lr.training.trainer import Trainer

    class PartsTrainer(Trainer):
        def train_step(self, data_iterator: Any) -> None:
            if not hasattr(self, "loaders"):
                build = partial(build_dataloader, tokenizer=None, job_config=config)
                size = {"dp_world_size": GROUP_SIZE}
                self.loaders = [build(**size, dp_rank=part) for part in range(GROUP_SIZE)]
                self.streams = [iter(loader) for loader in self.loaders]
            each = self.loaders[0].microbatches
            members = parts[max(step for step in parts if step <= self.step)]
            self.gradient_accumulation_steps = each * len(members)
            rows = [[next(self.streams[part]) for _ in range(each)] for part in members]
            super().train_step(chain(*rows))

    return PartsTrainer(config)


def train_parts(arguments: list[str], parts: dict[int, list[int]]) -> dict[str, Any]:
    return train_replica(arguments, "", partial(rows_of, parts))


@pytest.fixture(scope="module")
def references(one_rank: RankPool) -> list[dict[str, Any]]:
    """One process with the rows of the two replicas, and with those of all three."""
    arguments = [*MODEL, "--training.local_batch_size=4"]
    members = [0, 1], [0, 1, 2]
    return [one_rank.run(train_parts, arguments, {1: parts})[0] for parts in members]


def train_together(
    pools: dict[int, RankPool],
    arguments: list[str],
    folder: Any,
    build: dict[int, Any] | None = None,
) -> list[dict[str, Any]]:
    """Train replicas, each on a pool; return what their first ranks do.

    Args:
        pools: By replica.
        arguments: Of all replicas.
        folder: Their dump folder.
        build: What creates a replica's trainer, if another one.
    """
    from tests.support.lighthouse import lighthouse

    with (
        lighthouse("127.0.0.1:0", 2, 20.0, 5.0) as address,
        ThreadPoolExecutor(len(pools)) as threads,
    ):
        options = [
            *arguments,
            f"--job.custom_config_module={EXTENSION}",
            "--fault_tolerance.enable",
            "--fault_tolerance.digests",
            f"--fault_tolerance.group_size={GROUP_SIZE}",
            "--fault_tolerance.min_replica_size=2",
            f"--fault_tolerance.lighthouse=127.0.0.1:{address.rpartition(':')[2].strip('/')}",
        ]
        started = [
            threads.submit(
                pool.run,
                train_replica,
                [*options, f"--fault_tolerance.replica_id={replica}"],
                str(folder),
                (build or {}).get(replica),
            )
            for replica, pool in pools.items()
        ]
        return [future.result()[0] for future in started]


# The one test of replicas in the default suite.
@pytest.mark.parametrize("layout", ["shards", pytest.param("tensor", marks=pytest.mark.nightly)])
def test_replicas_of_two_ranks_train_like_one_process(
    layout: str, two_ranks: RankPool, references: list[dict[str, Any]], tmp_path: Any
) -> None:
    others = RankPool(2)
    pools = {0: two_ranks, 1: others}
    runs = train_together(pools, [*MODEL, *LAYOUTS[layout]], tmp_path)
    others.close()
    expected, with_another = references
    assert all(largest_difference(run, expected) < EXACT for run in runs)
    assert largest_difference(runs[0], with_another) > 1e-3
    logs = [commits(tmp_path, replica) for replica in (0, 1)]
    same = ("step", "replicas", "taken", "tokens", "loss", "norm", "digest")
    assert len(logs[0]) == 4
    for records in zip(*logs, strict=True):
        assert all(record[key] == records[0][key] for record in records for key in same)


def commits(folder: Any, replica: int) -> list[dict[str, Any]]:
    return read_history(folder / f"replica_{replica}/commits.jsonl")


def stops_in(step: int, config: Any) -> Any:
    """Build a trainer that begins with all replicas, and gets SIGTERM in a step."""
    from torchtitan_lr.experiments.replicas.trainer import ReplicaTrainer

    class StoppedTrainer(ReplicaTrainer):
        def _enter(self) -> Any:
            # The quorum waits for replicas that it knows.
            members = super()._enter()
            url = f"http://{self._section.lighthouse}/status"
            known: set[bytes] = set()
            while len(known) < GROUP_SIZE:
                time.sleep(0.02)
                with urllib.request.urlopen(url) as answer:
                    known = set(re.findall(rb"replica_\d", answer.read()))
            return members

        def train_step(self, data_iterator: Any) -> None:
            if self.step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            super().train_step(data_iterator)

    return StoppedTrainer(config)


@pytest.mark.nightly
def test_others_write_and_resume(one_rank: RankPool, tmp_path: Any) -> None:
    """The one that writes leaves, then all; later another number of replicas goes on."""
    own = [RankPool(1), RankPool(1)]
    pools = dict(enumerate([one_rank, *own]))
    arguments = [
        *MODEL,
        *("--training.local_batch_size=4", "--training.steps=6"),
        *("--checkpoint.enable", "--checkpoint.interval=20"),
    ]
    stops = {replica: partial(stops_in, 4 if replica else 2) for replica in pools}
    first = train_together(pools, arguments, tmp_path, stops)
    assert [run["step"] for run in first] == [2, 4, 4]
    again = {replica: partial(stops_in, 0) for replica in pools}
    runs = train_together(pools, arguments, tmp_path, again)
    members = {1: [0, 1, 2], 3: [1, 2], 5: [0, 1, 2]}
    expected = one_rank.run(train_parts, arguments, members)[0]
    # The first one has not seen two steps.
    curves = {key: runs[1][key] for key in ("losses", "grad_norms")}
    assert runs[0]["losses"] == [curves["losses"][i] for i in (0, 1, 4, 5)]
    assert all(largest_difference(run, expected) < EXACT for run in (*runs[1:], runs[0] | curves))
    without = one_rank.run(train_parts, arguments, {1: [0, 1, 2]})[0]
    assert largest_difference(runs[1], without) > 1e-3
    for pool in own:
        pool.close()
    taken = [record["taken"] for record in commits(tmp_path, 1)]
    assert taken == [[n - max(0, min(n, 4) - 2), n, n] for n in range(1, 7)]
    # The first, which went, then the first of those that stayed, then the first again.
    assert {path.name for path in tmp_path.glob("checkpoint/step-*")} == {"step-4", "step-6"}
