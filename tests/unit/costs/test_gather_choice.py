# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``estimate`` on the two ways of context parallelism."""

from dataclasses import replace

import pytest
import torch

import torchtitan_lr.training.register  # noqa: F401
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.costs.described_run import read_run
from torchtitan_lr.costs.gather_choice import gather_lines, gather_report
from torchtitan_lr.costs.hardware import load_hardware
from torchtitan_lr.costs.rehearsal import Workload, rehearse
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.plan_parts import TPSettings

ROW = ["--training.seq_len=131072", "--training.local_batch_size=1"]
ROW += ["--training.global_batch_size=-1"]
EIGHT = ["--parallelism.context_parallel_degree=8"]


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
    arguments = [f"--parallelism.tensor_parallel_degree={tp}", *ROW, *EIGHT]
    config = build_job_config([f"--job.config_file={config}", *arguments])
    report = gather_report(read_run(config, 8 * tp), 0, load_hardware(machine))
    lines = gather_lines(report)
    if line is None:  # no latents at full rank
        assert report["costs"].keys() == {"kv"} and len(lines) == 1
    else:
        assert lines[2].strip().startswith(line)


def shared(ranks: int, gather: str, tp: int = 1) -> Workload:
    """Two rows of 512 tokens of a model whose keys are wider than its rank."""
    args = replace(FLAVORS["cola"]["debug"], n_kv_heads=8)  # d_kv 128, r 32
    return Workload(args, TPSettings("btp"), tp, 2, 512, torch.bfloat16, ranks, gather)


def test_memory_falls_with_the_ranks():
    """Kept is 1/C of it; at work is a block's k and v, their gradients, and one copy more."""
    alone, kv, latents = (rehearse(shared(*s)) for s in ((1, "kv"), (4, "kv"), (4, "latents")))
    side_by_side = 2 * 128 * 128 * 2  # attention's output of both chunks, beside each
    assert kv.block == alone.block / 4 + side_by_side
    own_keys = 2 * 2 * 128 * 128 * 2  # k and v of 2 · 512 / 4 tokens, d_kv 128
    assert latents.block == kv.block - own_keys
    whole = 2 * 4 * 256 * 128 * 2  # bytes of k and v of all ranks' tokens
    for found in (kv, latents):
        assert whole / 2 < found.working - alone.working / 4 < 4 * whole
