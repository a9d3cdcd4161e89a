# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas of two ranks, one of which dies: the run of one process with the same batches."""

import importlib.util
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from tests.integration.runs import LAUNCH, ROOT, Process, history, write_config
from tests.support.lighthouse import lighthouse
from torchtitan_lr.training.history import read_history

if importlib.util.find_spec("torchft") is None:
    pytest.skip("torchft is not installed (the extra `ft`)", allow_module_level=True)

SITE = Path(importlib.util.find_spec("torchft").origin).parents[1]

STEPS = 9
EXTENSION = "--job.custom_config_module=torchtitan_lr.experiments.replicas.job_config"

TSR = """
[fault_tolerance]
group_size = 2
min_replica_size = 2
digests = true
"""

OPTIONS = (
    "--model.flavor=debug",
    "--optimizer.name=TSRAdam",
    "--optimizer.eps=1e-5",  # rounding noise moves no weight
    "--optimizer.lr=1e-3",
    "--optimizer.tsr_rank=16",
    "--optimizer.tsr_embedding_rank=16",
    "--optimizer.tsr_refresh_interval=3",
    "--optimizer.tsr_embedding_refresh_interval=3",
    "--training.mixed_precision_param=float32",
    "--training.seq_len=16",
    "--validation.no_enable",
    "--checkpoint.no_enable",
)


def start(config, end, replica, *options, ranks=2):
    """Starts a replica."""
    own = [f"--fault_tolerance.replica_id={replica}", f"--fault_tolerance.lighthouse={end}"]
    return Process(
        [*LAUNCH, *OPTIONS, EXTENSION, "--fault_tolerance.enable", *own, *options],
        CONFIG_FILE=str(config),
        NGPU=str(ranks),
        PYTHONPATH=f"{ROOT}{os.pathsep}{SITE}",
    )


def commits(folder, replica):
    return read_history(folder / f"replica_{replica}" / "commits.jsonl")


LAYOUTS = {"shards": (8, []), "tensor": (4, ["--parallelism.tensor_parallel_degree=2"])}
"""Rows of a step on two replicas of two ranks, and the layout of these ranks."""


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_dies_and_all_is_as_in_one_process(layout, tmp_path):
    rows, split = LAYOUTS[layout]
    folder = tmp_path / "run"
    config = write_config(folder, "llama_cola", steps=STEPS, extra=TSR)
    with lighthouse("127.0.0.1:0", 2, join_seconds=60.0, heartbeat_seconds=1.0) as address:
        end = f"127.0.0.1:{address.rpartition(':')[2].strip('/')}"
        first, second = (start(config, end, replica, *split) for replica in (0, 1))
        second.wait_until(lambda: len(commits(folder, 1)) >= 4)
        # The second rank dies, and with it the replica; the other one waits.
        os.kill(second.rank_pids()[1], signal.SIGKILL)
        died = second.finish()
        assert died.status != 0 and "SIGKILL" in died.err, died.everything
        second = start(config, end, 1, *split)
        ends = [first.finish(), second.finish()]
    everything = "".join(done.everything for done in ends)
    assert [done.status for done in ends] == [0, 0], everything
    assert "[torchft::" not in everything  # several lines per step, unless RUST_LOG=info
    logs = [{record["step"]: record for record in commits(folder, replica)} for replica in (0, 1)]
    both = logs[0].keys() & logs[1].keys()
    assert sorted(logs[0]) == list(range(1, STEPS + 1)) and STEPS in both
    assert all(logs[0][step]["digest"] == logs[1][step]["digest"] for step in both)
    assert len(logs[0][STEPS]["digest"].split("-")) == 2
    # One process with the same rows in each step.
    alone = tmp_path / "alone"
    config = write_config(alone, "llama_cola", steps=STEPS)
    options = [*OPTIONS, f"--training.local_batch_size={rows}"]
    done = Process([*LAUNCH, *options], CONFIG_FILE=str(config), NGPU="1").finish()
    assert done.status == 0, done.everything
    expected = history(alone)
    found = {record["step"]: record for record in history(folder / "replica_0")}
    keys = ("loss_metrics/global_avg_loss", "grad_norm", "n_tokens_seen", "lr")
    for record in expected:
        for key in keys:
            assert found[record["step"]][key] == pytest.approx(record[key], rel=1e-4), (key, record)
            assert logs[0][record["step"]]["tokens"] > 0
    # The control: two steps differ by more than the limit.
    norms = [record["grad_norm"] for record in expected]
    assert all(abs(a / b - 1) > 1e-3 for a, b in pairwise(norms))
