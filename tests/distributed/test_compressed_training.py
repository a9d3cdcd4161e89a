# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Runs with compressed gradients: metrics, and resumes with other residuals.

Parity, messages, and resumes as they are, are in `test_layout`.
"""

import shutil
from pathlib import Path
from typing import Any

from tests.distributed.training import train
from tests.support.parity_runs import largest_difference
from tests.support.rank_pool import RankPool
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


def copy_of(folder: str, tmp_path: Path) -> str:
    shutil.copytree(folder, tmp_path / "run")
    return str(tmp_path / "run")


def test_a_dense_runs_checkpoint_needs_a_word(four_ranks: RankPool, tmp_path: Path) -> None:
    dense = [*FSDP4, "--training.steps=4", "--checkpoint.enable"]
    folder = four_ranks.run(train, dense, "sigterm@2")[0]["dump_folder"]
    for error in four_ranks.errors(train, RESUMABLE, "", copy_of(folder, tmp_path)):
        assert "expected one with grad_compression: it holds" in error
    without = ["--checkpoint.exclude_from_loading=grad_compression", "--checkpoint.load_step=2"]
    options = [*RESUMABLE, *without]
    assert four_ranks.run(train, options, "", folder)[0]["step"] == 4
