# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""`scripts/check/ft_kills.py` in short: replicas struck within a step, and logs that are wrong."""

import importlib.util
import json

import pytest

from tests.scripts import load_script
from tests.support.faults.fleet import Fleet, Place, Setting
from tests.support.faults.orders import BEFORE, COMMITTED, DURING, PLAIN, REFRESH, Strike
from tests.support.faults.trials import Trials
from tests.support.faults.verdict import judge
from torchtitan_lr.replicas.commits import COMMITS_FILE
from torchtitan_lr.scaling.experiments import check_run

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
    arguments = ["--job.config_file=debug_replicas", *load_script("check/ft_kills").SMALL]
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
