# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``estimate`` on the two ways of context parallelism."""

from dataclasses import replace

import pytest

import torchtitan_lr.training.register  # noqa: F401
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.estimate.context import gather_lines, gather_report
from torchtitan_lr.estimate.hardware import load_hardware
from torchtitan_lr.estimate.run import read_run

ROW = ["--training.seq_len=131072", "--training.local_batch_size=1"]
ROW += ["--training.global_batch_size=-1"]


@pytest.mark.parametrize(
    ("config", "machine", "tp", "line"),
    [
        ("cola_7b", "h100", 2, "gathering latents takes less time"),  # between nodes: 50 GB/s
        ("cola_7b", "h100", 4, "latents never pay here: their rank, 1024, is not below the 1024"),
        ("cola_8b", "h100_10gbit", 1, "latents never pay here"),
        ("full_8b_gqa", "h100", 1, None),
    ],
)
def test_which_way_is_faster(config, machine, tp, line):
    arguments = [f"--parallelism.tensor_parallel_degree={tp}", *ROW]
    config = build_job_config([f"--job.config_file={config}", *arguments])
    config.parallelism.context_parallel_degree = 8
    report = gather_report(read_run(config, 8 * tp), 0, load_hardware(machine))
    lines = gather_lines(report)
    if line is None:  # no latents at full rank
        assert report["costs"].keys() == {"kv"} and len(lines) == 1
    else:
        assert lines[2].strip().startswith(line)


def test_a_fast_link_favours_keys_and_values():
    """7B in a node: at 8,000 GB/s the products of latents cost more than their bytes save."""
    arguments = ["--job.config_file=cola_7b", *ROW]
    config = build_job_config(arguments)
    config.parallelism.context_parallel_degree = 8
    run, h100 = read_run(config, 8), load_hardware("h100")
    costs = {}
    for speed in (50.0, 8000.0):
        machine = replace(h100, intra_node_gbytes_per_s=speed)
        costs[speed] = gather_report(run, 0, machine)
    assert [costs[speed]["faster"] for speed in costs] == ["latents", "kv"]
    # 3 collectives of k and v (or of two latents) per block: 7/8 of the bytes cross the link.
    kv = costs[50.0]["costs"]["kv"]
    assert kv["bytes"] == 32 * 3 * 2 * 131072 * 4096 * 2
    assert kv["send_seconds"] == pytest.approx(7 / 8 * kv["bytes"] / 50e9, rel=0.01)
