# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A background save writes what one in the foreground writes, whatever training does meanwhile."""

from pathlib import Path

import pytest

from tests.distributed.training import train
from tests.support.nightly import nightly
from tests.support.rank_pool import RankPool
from torchtitan_lr.checkpoints.record import read_step

OPTIONS = [
    *("--training.steps=3", "--checkpoint.enable", "--checkpoint.interval=1"),
    *("--model.name=llama_full", "--training.local_batch_size=4"),
]
METHODS = {
    "tsr": [
        *("--optimizer.name=TSRAdam", "--parallelism.data_parallel_replicate_degree=2"),
        *("--parallelism.data_parallel_shard_degree=1", "--optimizer.tsr_rank=4"),
    ],
    # Its residual changes during backward, long before the optimizer's step.
    "tagc": [
        *("--grad_compression.codec=sparse", "--grad_compression.level=10x"),
        "--training.seq_len=64",
    ],
}
Files = dict[str, dict[str, list[int]]]
"""Size and checksum of what each rank wrote, by step."""


def save_each_step(mode: str, arguments: list[str]) -> Files:
    """Train three steps and save each of them, on every rank."""
    run = train([*OPTIONS, *arguments, f"--checkpoint.async_mode={mode}"])
    found = {}
    for folder in (Path(run["dump_folder"]) / "checkpoint").glob("step-*"):
        record = read_step(folder)
        assert record.finite
        files = record.files.items()
        found[folder.name] = {name: sums for name, sums in files if name != ".metadata"}
    return found


@pytest.mark.parametrize("method", ["tagc", *nightly("tsr")])
def test_the_files_are_the_same(method: str, two_ranks: RankPool) -> None:
    foreground = two_ranks.run(save_each_step, "disabled", METHODS[method])[0]
    files = two_ranks.run(save_each_step, "async", METHODS[method])[0]
    assert files.keys() == {"step-1", "step-2", "step-3"}
    assert [*files["step-1"]] == ["__0_0.distcp", "__1_0.distcp"]
    assert files == foreground
