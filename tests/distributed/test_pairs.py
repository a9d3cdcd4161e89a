# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pairs train like one process where a rank has no label (fp64); others are in `test_layout`."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.training import train
from tests.support.parity_runs import EXACT, largest_difference, model
from tests.support.rank_pool import RankPool
from torchtitan_lr.data import dataloader
from torchtitan_lr.data.corpus import Batch, read_parts
from torchtitan_lr.training.history import HISTORY_FILE, read_history
from torchtitan_lr.training.reader import StepData, StepReader

REPLICATE4 = ["--parallelism.data_parallel_replicate_degree=4", "--training.local_batch_size=1"]
OPTIONS = ["--training.dataset=local", "--training.steps=3", *model("cola")]


def without_some_labels(*args: Any) -> Batch:
    """Drop all labels of about two rows in three, by the row's own tokens."""
    inputs, labels = read_parts(*args)
    labels[inputs["input"].sum(-1) % 3 > 0] = -100
    return inputs, labels


def train_on(corpus: str, arguments: list[str]) -> dict[str, Any]:
    """Train; return the labels of this rank in every step too."""
    seen: list[tuple[int, int]] = []

    class Reader(StepReader):
        def take(self, *args: Any) -> StepData:
            data = super().take(*args)
            seen.append((data.tokens, int(data.global_tokens)))
            return data

    path = f"--training.dataset_path={corpus}"
    with (
        patch.object(dataloader, "read_parts", without_some_labels),
        patch("torchtitan_lr.training.trainer.StepReader", Reader),
    ):
        return train([*OPTIONS, path, *arguments], everywhere=True) | {"seen": seen}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pairs") / "a.jsonl"
    records = [{"prompt": f"{i}:", "completion": f" {'yes ' * (i % 11)}{i}"} for i in range(200)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def reference(one_rank: RankPool, corpus: str) -> dict[str, Any]:
    alone: dict[str, Any] = one_rank.run(train_on, corpus, [])[0]
    return alone


def test_ranks_equal_one_process(
    four_ranks: RankPool, corpus: str, reference: dict[str, Any]
) -> None:
    runs = four_ranks.run(train_on, corpus, REPLICATE4)
    counts = [run["seen"] for run in runs]
    totals = [total for _, total in reference["seen"]]
    assert all([total for _, total in run] == totals for run in counts)
    records = read_history(Path(runs[0]["dump_folder"]) / HISTORY_FILE)
    assert [record["label_tokens"] for record in records] == totals
    assert any(own == 0 < total for run in counts for own, total in run)
    # The largest mean of a rank with labels.
    for record in records:
        assert record["loss_metrics/global_max_loss"] > record["loss_metrics/global_avg_loss"]
    assert largest_difference(runs[0], reference) < EXACT
