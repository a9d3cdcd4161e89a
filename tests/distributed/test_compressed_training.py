# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs with compressed gradients: metrics, and resumes with other residuals.

Parity, messages, and resumes as they are, are in `test_layout`.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.training import train
from tests.support.parity_runs import largest_difference
from tests.support.rank_pool import RankPool
from torchtitan_lr.checkpoints.folders import RESIDUALS
from torchtitan_lr.checkpoints.safe_metadata import read_metadata
from torchtitan_lr.training.history import HISTORY_FILE, read_history

# Enough tokens that the embedding's gradient has more entries than are sent.
FSDP4 = ["--model.name=llama_full", "--training.local_batch_size=2", "--training.seq_len=64"]
SKETCH = ["--grad_compression.codec=sketch", "--grad_compression.level=10x"]


def history(run: dict[str, Any]) -> list[dict[str, Any]]:
    return read_history(Path(run["dump_folder"]) / HISTORY_FILE)


def test_metrics_tell_what_compression_did(four_ranks: RankPool) -> None:
    dense = [*FSDP4, "--training.steps=3", "--metrics.comm_ledger"]
    run = four_ranks.run(train, [*dense, *SKETCH], "", "", False)[0]  # bytes are those of fp32
    records = history(run)
    assert len(records) == 3
    for record in records:
        assert record["grad_compression/sparsity"] >= 0.9875
        assert record["grad_compression/sparsity"] < 0.99
        assert record["grad_compression/unpeeled_share"] < 0.01
    norms = [record["grad_compression/residual_norm"] for record in records]
    assert norms == sorted(norms) and norms[0] > 0  # it fills up in the first steps
    counted = four_ranks.run(train, dense, "", "", False)[0]
    difference = history(counted)[-1]["comm_bytes/fsdp"] - records[-1]["comm_bytes/fsdp"]
    assert difference == records[-1]["grad_compression/bytes_saved"]
    # The largest 1.25% are not everything: a codec that were never called would not show.
    assert largest_difference(run, counted) > 1e-3
    assert run["losses"][0] == counted["losses"][0]


RESUMABLE = [*FSDP4, *SKETCH, "--training.steps=4", "--checkpoint.enable"]


@pytest.fixture(scope="module")
def undisturbed(four_ranks: RankPool) -> dict[str, Any]:
    return four_ranks.run(train, RESUMABLE)[0]


@pytest.fixture(scope="module")
def stopped(four_ranks: RankPool) -> str:
    return four_ranks.run(train, RESUMABLE, "sigterm@2")[0]["dump_folder"]


def copy_of(folder: str, tmp_path: Path) -> str:
    shutil.copytree(folder, tmp_path / "run")
    return str(tmp_path / "run")


def test_a_run_that_saves_no_residuals_goes_on_with_empty_ones(
    four_ranks: RankPool, undisturbed: dict[str, Any], stopped: str, tmp_path: Path
) -> None:
    options = [*RESUMABLE, "--grad_compression.no_save_residuals"]
    run = four_ranks.run(train, options, "sigterm@2")[0]
    saved = [read_metadata(path) for path in Path(run["dump_folder"]).glob("checkpoint/step-*")]
    names = {name for found in saved for name in found.state_dict_metadata}
    assert names and not any(name.startswith(RESIDUALS) for name in names)
    resumed = four_ranks.run(train, options, "", run["dump_folder"])[0]
    dropped = [*RESUMABLE, "--checkpoint.exclude_from_loading=grad_compression"]
    expected = four_ranks.run(train, dropped, "", copy_of(stopped, tmp_path))[0]
    assert largest_difference(resumed, expected) == 0.0 < largest_difference(resumed, undisturbed)


def test_a_dense_runs_checkpoint_needs_a_word(four_ranks: RankPool, tmp_path: Path) -> None:
    dense = [*FSDP4, "--training.steps=4", "--checkpoint.enable"]
    folder = four_ranks.run(train, dense, "sigterm@2")[0]["dump_folder"]
    for error in four_ranks.errors(train, RESUMABLE, "", copy_of(folder, tmp_path)):
        assert "saved with gradient compression" in error
    options = [*RESUMABLE, "--checkpoint.exclude_from_loading=grad_compression"]
    assert four_ranks.run(train, options, "", folder)[0]["step"] == 4
