# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Ranks on the CPU that do not fit in their machine's memory."""

import re
from pathlib import Path

import pytest

from tests.support.config_checks import check, refusal
from torchtitan_lr.checks import memory

# 512 sequences of 128 tokens: about 3 GiB for the main job's model.
LARGE = ["--training.local_batch_size=512", "--parallelism.tensor_parallel_degree=1"]
NOT_COMPILED = "--compile.no_enable"


@pytest.fixture
def machine(monkeypatch):
    def has(gib):
        monkeypatch.setattr(memory, "machine_memory", lambda: gib * 2**30)

    return has


def test_a_batch_that_cannot_fit_is_refused_with_one_that_does(machine, tmp_path):
    machine(1)
    here = [NOT_COMPILED, f"--job.dump_folder={tmp_path}"]
    refused = refusal(*LARGE, *here, world=1)
    found = re.search(
        r"^training\.local_batch_size: got 512, expected at most (\d+), .* the ranks need "
        r"([\d.]+) GiB, this machine has 1\.0; training\.check_memory = false starts anyway$",
        refused,
    )
    assert found and float(found[2]) > 1
    fits = int(found[1])
    check(*LARGE, *here, f"--training.local_batch_size={fits}", world=1)
    more = f"--training.local_batch_size={fits + fits // 20}"
    assert "expected at most" in refusal(*LARGE, *here, more, world=1)
    check(*LARGE, *here, "--training.no_check_memory", world=1)
    check(*LARGE, *here, world=1, device="cuda")
    # Two ranks on one machine need twice as much.
    assert "expected at most" in refusal(
        *LARGE, *here, f"--training.local_batch_size={fits}", world=2
    )


def test_a_groups_limit_is_the_machines_memory(monkeypatch, tmp_path):
    whole = memory.machine_memory()
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
    groups = Path("/proc/self/cgroup")
    if not groups.exists():
        pytest.skip("has no groups of processes")
    for line in groups.read_text().splitlines():
        _, kind, name = line.split(":", 2)
        group = tmp_path / kind / name.lstrip("/")
        group.mkdir(parents=True, exist_ok=True)
        (group / ("memory.limit_in_bytes" if kind else "memory.max")).write_text("4096\n")
    assert memory.machine_memory() == 4096 < whole
