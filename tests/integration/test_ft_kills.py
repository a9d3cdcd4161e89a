# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas struck within a step, and logs that are wrong."""

import importlib.util
import json
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.support.faults.fleet import Fleet, Place, Setting
from tests.support.faults.network import places
from tests.support.faults.orders import BEFORE, COMMITTED, DURING, PLAIN, REFRESH, Strike
from tests.support.faults.parts import PARTS, outcomes_of
from tests.support.faults.trials import Trials
from tests.support.faults.verdict import judge
from tests.support.namespaces import NotPermittedError
from torchtitan_lr.replicas.commits import COMMITS_FILE
from torchtitan_lr.scaling.experiments import check_run

SMALL = [
    *("--training.seq_len=32", "--training.local_batch_size=1", "--validation.no_enable"),
    *("--checkpoint.no_enable", "--training.steps=100000", "--lr_scheduler.warmup_steps=1"),
    *("--optimizer.lr=1e-4", "--optimizer.tsr_refresh_interval=8"),
    *("--optimizer.tsr_embedding_refresh_interval=8", "--fault_tolerance.digests"),
    "--fault_tolerance.process_group_timeout_ms=4000",
]
"""Short steps; a low rate, at which rounding grows little in a thousand steps."""

STRIKES = [
    Strike("SIGKILL", DURING, REFRESH, 4),
    Strike("SIGSTOP", BEFORE, PLAIN, 3),
    Strike("SIGKILL", COMMITTED, PLAIN),
]


@pytest.fixture
def setting(request, tmp_path):
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("torchft is not installed (the extra `ft`)")
    if not request.config.getoption("--full"):
        pytest.skip("four processes that import torch: with --full")
    arguments = ["--job.config_file=debug_replicas", *SMALL]
    config = check_run(arguments, 1)
    return Setting(config, arguments, tmp_path / "run", [Place()] * 3, pause=0.3)


def test_replicas_struck_within_a_step(setting, tmp_path):
    fleet = Fleet(setting)
    try:
        fleet.start_lighthouse()
        for replica in range(3):
            fleet.start(replica)
        fleet.wait_full()
        trials = Trials(fleet)
        outcomes = [trials.strike(strike) for strike in STRIKES]
        outcomes.append(trials.strike(Strike("SIGKILL", BEFORE, REFRESH, 2), 2))
    finally:
        fleet.stop()
    assert [len(outcome.replicas) for outcome in outcomes] == [1, 1, 1, 2]
    found = judge(setting.arguments, setting.folder, tmp_path / "replay")
    assert found.holds, found
    assert found.records > 2 * found.steps
    # The last step with all members, recorded without one: it had other data.
    logs = list(setting.folder.glob(f"replica_*/{COMMITS_FILE}"))
    last = max(json.loads(path.read_text().splitlines()[-1])["step"] for path in logs)
    for path in logs:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            if record["step"] == last - 1:
                record["replicas"] = record["replicas"][:1]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert not judge(setting.arguments, setting.folder, tmp_path / "other").holds


@pytest.mark.parametrize("part", PARTS)
def test_every_point_of_a_step(part, setting, tmp_path):
    with ExitStack() as stack:
        if part == "network":
            try:
                where = stack.enter_context(places(3))
            except NotPermittedError as error:
                pytest.skip(str(error))
            setting = replace(setting, places=where)
        fleet = Fleet(setting)
        stack.callback(fleet.stop)
        assert list(outcomes_of(part, fleet, 1))
    assert judge(setting.arguments, setting.folder, tmp_path / "replay").holds
