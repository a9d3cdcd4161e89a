# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas that are killed and come back: `scripts/ft_demo.py`, whose checks are independent."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.commands import ROOT
from tests.integration.runs import LIMIT

SMALL = ["--training.steps=40", "--training.seq_len=32", "--training.local_batch_size=1"]
SMALL += ["--validation.no_enable"]


def test_a_killed_replica_joins_again(request, tmp_path):
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("torchft is not installed (the extra `ft`)")
    if not request.config.getoption("--full"):
        pytest.skip("four processes that import torch: with --full")
    out = tmp_path / "demo"
    command = [sys.executable, ROOT / "scripts/ft_demo.py", *SMALL, "--out", out]
    # Alone, replica 1 is no majority: it waits until replica 2 is back.
    command += ["--kill", "8:2,12:0", "--back", "2", "--limit", str(LIMIT), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "ft_demo.json").read_text())
    assert found["steps"] == 40
    members = [row[1] for row in found["changes"]]
    assert members.index("0 1") < members.index("1 2")
    assert found["steps_with_unequal_bits"] == [] and found["data_used_twice"] == []
    assert found["largest_loss_difference_of_the_replay"] < 1e-4
