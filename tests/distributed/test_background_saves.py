# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A background save writes what a save in the foreground writes, however late it copies."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.training import train
from tests.support.nightly import nightly
from tests.support.rank_pool import RankPool
from torchtitan_lr.checkpoints import staging
from torchtitan_lr.checkpoints.manifest import read_manifest
from torchtitan_lr.compression.compressor import Compressor
from torchtitan_lr.optim.step import step_unless
from torchtitan_lr.training.checkpoint import CheckpointManager

OPTIONS = [
    *("--training.steps=3", "--checkpoint.enable", "--checkpoint.interval=1"),
    *("--model.name=llama_full", "--training.local_batch_size=4"),
]
METHODS = {
    "adam": [],
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
TRAINER = "torchtitan_lr.training.trainer"

Files = dict[str, dict[str, list[int]]]
"""Size and checksum of what each rank wrote, by step."""


def save_each_step(mode: str, arguments: list[str], too_late: str = "") -> Files:
    """Train three steps and save each of them, on every rank.

    A background copy starts when training begins to wait for it: at the last moment.

    Args:
        mode: ``checkpoint.async_mode``.
        arguments: As on the command line.
        too_late: What changes its state before the copy: ``optimizer``, ``residual`` or nothing.
    """
    asked, copied = threading.Event(), staging._copied
    unheeded: list[CheckpointManager] = []

    def copy_when_asked(*parts: Any) -> Any:
        assert asked.wait(30)
        asked.clear()
        return copied(*parts)

    class Manager(CheckpointManager):
        def maybe_wait_for_staging(self) -> None:
            if too_late == "optimizer" and not unheeded:
                unheeded.append(self)
            elif self.enable_staging and self.staging:
                asked.set()
                super().maybe_wait_for_staging()

    def step(*parts: Any) -> None:
        step_unless(*parts)
        if unheeded:
            unheeded[0].maybe_wait_for_staging()
            unheeded.clear()

    ignored = "before_writing" if too_late == "residual" else "no_attribute"
    deaf = property(lambda _: lambda: None, lambda *_: None)
    with (
        patch.object(staging, "_copied", copy_when_asked),
        patch(f"{TRAINER}.Trainer.checkpoint_manager", Manager),
        patch(f"{TRAINER}.step_unless", step),
        patch.object(Compressor, ignored, deaf, create=True),
    ):
        run = train([*OPTIONS, *arguments, f"--checkpoint.async_mode={mode}"])
    found = {}
    for folder in (Path(run["dump_folder"]) / "checkpoint").glob("step-*"):
        manifest = read_manifest(folder)
        assert manifest is not None
        assert manifest.finite
        files = manifest.files.items()
        found[folder.name] = {name: sums for name, sums in files if name != ".metadata"}
    return found


@pytest.fixture(scope="module")
def foreground(two_ranks: RankPool) -> dict[str, Files]:
    """What each method saves in the foreground."""
    return {m: two_ranks.run(save_each_step, "disabled", METHODS[m])[0] for m in METHODS}


@pytest.mark.parametrize("method", ["tsr", "tagc", *nightly("adam")])
def test_the_files_are_the_same(
    method: str, two_ranks: RankPool, foreground: dict[str, Files]
) -> None:
    files = two_ranks.run(save_each_step, "async", METHODS[method])[0]
    assert files.keys() == {"step-1", "step-2", "step-3"}
    assert [*files["step-1"]] == ["__0_0.distcp", "__1_0.distcp"]
    assert files == foreground[method]


@pytest.mark.parametrize(("method", "too_late"), [("adam", "optimizer"), ("tagc", "residual")])
def test_a_copy_too_late_would_be_noticed(
    method: str, too_late: str, two_ranks: RankPool, foreground: dict[str, Files]
) -> None:
    files = two_ranks.run(save_each_step, "async", METHODS[method], too_late)[0]
    assert files["step-3"] == foreground[method]["step-3"]  # the run itself is the same
    for step in ("step-1", "step-2"):
        for name, sums in files[step].items():
            assert sums != foreground[method][step][name]
