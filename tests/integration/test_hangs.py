# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A test that hangs fails with the stacks of whoever hangs, and the tests after it run."""

import re
import subprocess
import sys

import pytest

from tests.integration import runs

pytestmark = [
    pytest.mark.nightly,  # it waits for time limits
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes by /proc"),
]

HANGING = """
import subprocess, sys, threading, time
import pytest
import torch, torch.distributed as dist
from tests.integration import runs
from tests.support.rank_pool import RankPool

@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()

def same(x):
    return x

def wait_for_the_other():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))

def test_pool(pool):
    assert pool.run(same, 1) == [1, 1]

@pytest.mark.timeout(6)
def test_ranks(pool):
    pool.run(wait_for_the_other)

def test_pool_again(pool):
    assert pool.run(same, 2) == [2, 2]

@pytest.mark.timeout(2)
def test_unit():
    threading.Event().wait()

@pytest.mark.timeout(2)
def test_child():
    subprocess.run(["sleep", "999"])

def test_program(tmp_path):
    program = "def in_vain():\\n    open('begun', 'w')\\n    while True: pass\\nin_vain()"
    (tmp_path / "waits.py").write_text(program)
    process = runs.Process([sys.executable, tmp_path / "waits.py"], cwd=tmp_path)
    process.wait_until((tmp_path / "begun").exists)
    process._deadline = time.monotonic()
    process.finish()

def test_last():
    pass
"""

STACKS = ("in wait_for_the_other", "threading.Event().wait()", 'run(["sleep"', "in in_vain")


def test_every_kind_of_hang_fails_with_its_stack_and_the_rest_runs(tmp_path):
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", tmp_path]
    command = [sys.executable, "-m", "pytest", "-c", runs.ROOT / "pyproject.toml", *options]
    done = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True)
    text = done.stdout + done.stderr
    failed = re.findall(r"^FAILED \S*::(\w+)", text, re.MULTILINE)
    assert failed == ["test_ranks", "test_unit", "test_child", "test_program"], text
    assert "4 failed, 3 passed" in text
    assert [stack for stack in STACKS if stack not in text] == [], text
