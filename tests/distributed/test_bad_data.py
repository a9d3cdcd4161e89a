# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Data that cannot be read: the run saves, stops on every rank, and goes on once it is mended."""

import os
import re
import shutil
import signal
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.distributed.training import train
from tests.support import parity_runs
from tests.support.corpora import write_corpus
from tests.support.rank_pool import RankPool
from torchtitan_lr.checkpoints.saving import verified
from torchtitan_lr.data import dataloader
from torchtitan_lr.data.corpus import Batch, Corpus
from torchtitan_lr.titan.base import JobConfig
from torchtitan_lr.training.trainer import Trainer

STEPS = 7
DP2 = [
    "--training.local_batch_size=2",
    "--training.global_batch_size=4",
    f"--training.steps={STEPS}",
    "--training.dataset=prepared",
    "--training.shuffle=false",  # the second shard is reached after some steps
    "--checkpoint.enable",
    "--checkpoint.interval=100",
]
TP2_DP2 = [*DP2, "--parallelism.tensor_parallel_degree=2"]


def train_on(corpus: str, dump_folder: str) -> dict[str, Any]:
    return train([*TP2_DP2, f"--training.dataset_path={corpus}"], "", dump_folder)


def train_and_lose(corpus: str, dump_folder: str, shard: str) -> dict[str, Any]:
    """Train on a corpus of which a file vanishes behind the checks before the start."""

    def build(config: JobConfig) -> Trainer:
        dist.barrier()  # all have checked
        if dist.get_rank() == 0:
            Path(shard).rename(f"{shard}.away")
        dist.barrier()
        Corpus.shard.cache_clear()  # a run's ranks have not opened what the launcher has checked
        return Trainer(config)

    arguments = [*TP2_DP2, f"--training.dataset_path={corpus}"]
    return parity_runs.train(arguments, dump_folder, build=build)


VALIDATED = ["enable", "freq=4", "steps=2", "dataset=python_stdlib", "seq_len=16"]


def train_and_hang(corpus: str, dump_folder: str, pipe: str, what: str) -> dict[str, Any]:
    """Train; a read of rank 1 behind step 4 never returns, and then the rank gets a signal."""

    def build(config: JobConfig) -> Trainer:
        trainer = Trainer(config)
        rows: Any = trainer.dataloader.dataset
        name = "__getitems__"
        if what == "validation":
            (rows,), name = trainer.validator.sets["validation"]._parts, "read"
        read = getattr(rows, name)

        def stuck(numbers: Any) -> Batch:
            if dist.get_rank() == 1 and (what == "validation" or numbers[0] >= 4 * 4):
                Timer(2, os.kill, (os.getpid(), signal.SIGTERM)).start()
                open(pipe).close()  # nobody writes into it
            return read(numbers)

        setattr(rows, name, stuck)
        return trainer

    arguments = [*DP2, f"--training.dataset_path={corpus}"]
    arguments += [f"--validation.{key}" for key in VALIDATED] if what == "validation" else []
    with patch.object(dataloader, "LAST_READ_SECONDS", 0.1):
        run = parity_runs.train(arguments, dump_folder, build=build)
    if dist.get_rank() == 1:
        open(pipe, "w").close()  # the rank is used again
    return run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards; a global batch has 4 rows of 17 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = [[(7 * i + j) % 4000 for j in range(50)] for i in range(40)]
    write_corpus(folder, [documents[:8], documents[8:]])
    return folder


def test_a_shard_that_is_gone_saves_and_stops_and_the_mended_corpus_goes_on(
    four_ranks: RankPool, corpus: Path, tmp_path: Path
) -> None:
    dump, shard = str(tmp_path / "dump"), corpus / "train-00001.idx"
    (message,) = set(four_ranks.errors(train_and_lose, str(corpus), dump, str(shard)))
    found = re.search(r"BadDataError: step (\d+): rank \d: (.*)", message)
    assert found, message
    last, text = int(found[1]) - 1, found[2]
    assert f"got '{corpus}/train-00001.idx', expected a readable pair" in text
    assert f"saved as {dump}/checkpoint/step-{last}" in text
    assert last == 8 * 50 // (4 * 17)  # nothing else saves that early
    Path(f"{shard}.away").rename(shard)
    resumed = four_ranks.run(train_on, str(corpus), dump)[0]
    whole = four_ranks.run(train_on, str(corpus), "")[0]
    assert resumed["losses"] == whole["losses"]


@pytest.mark.parametrize("what", ["training", "validation"])
def test_a_read_that_never_returns_does_not_keep_a_run_from_its_stop(
    what: str, two_ranks: RankPool, corpus: Path, tmp_path: Path
) -> None:
    """The first signal saves and ends it: the data of the next step are not needed."""
    os.mkfifo(tmp_path / "pipe")
    dump = tmp_path / "dump"
    runs = two_ranks.run(train_and_hang, str(corpus), str(dump), str(tmp_path / "pipe"), what)
    assert {run["step"] for run in runs} == {4} and not runs[0]["val_losses"]
    assert verified(dump / "checkpoint/step-4").finite


def train_on_own(corpora: list[str]) -> dict[str, Any]:
    """Each rank has the corpus of its number, as machines without a shared folder have."""
    two = ["--training.local_batch_size=2", "--training.dataset=prepared", "--training.steps=1"]
    return train([*two, f"--training.dataset_path={corpora[dist.get_rank()]}"], "", "")


def test_ranks_with_other_tokens_are_refused_in_one_line(
    two_ranks: RankPool, corpus: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    assert two_ranks.run(train_on_own, [str(corpus), str(copy)])[1]["step"] == 1
    other = write_corpus(tmp_path / "other", [[[7] * 900]])
    for text in two_ranks.errors(train_on_own, [str(corpus), str(other.folder)]):
        line = text.strip().splitlines()[-1]
        assert "ConfigError: training.dataset: got" in line and other.identity[:16] in line
        assert "the same tokens on all machines; rank 0 has" in line
