# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Data that cannot be read: the run saves, stops on every rank, and goes on once it is mended."""

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.training import train
from tests.support.rank_pool import RankPool
from torchtitan_lr.data import local_corpus

STEPS, BROKEN_LINE = 10, 25
TEXT = "".join(f"word{i} is {i * i}\n" for i in range(40))
TP2_DP2 = [
    "--parallelism.tensor_parallel_degree=2",
    "--training.local_batch_size=2",
    "--training.global_batch_size=4",
    f"--training.steps={STEPS}",
    "--training.seq_len=256",
    "--training.shuffle=false",  # the broken line is reached after some steps
    "--checkpoint.enable",
    "--checkpoint.interval=100",
]


def write(path: Path, broken: bool) -> None:
    """Write one document a line, one of which may be no JSON, of the same length or not."""
    lines = [json.dumps({"text": f"{i} {TEXT}"}) for i in range(60)]
    if broken:
        lines[BROKEN_LINE - 1] = lines[BROKEN_LINE - 1].removesuffix('"}')
    path.write_text("".join(line + "\n" for line in lines))


def train_on(corpus: str, arguments: list[str], dump_folder: str) -> dict[str, Any]:
    """Train on a corpus that counts as a large one: only training itself reads all of it."""
    options = ["--training.dataset=local", f"--training.dataset_path={corpus}"]
    with patch.object(local_corpus, "SMALL_BYTES", 0):
        return train([*TP2_DP2, *options, *arguments], "", dump_folder)


@pytest.fixture(scope="module")
def whole(four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the run on the intact corpus."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder / "a.jsonl", broken=False)
    return list(four_ranks.run(train_on, str(folder / "a.jsonl"), [], "")[0]["losses"])


def test_a_broken_line_saves_and_stops_and_the_mended_file_goes_on(
    four_ranks: RankPool, whole: list[float], tmp_path: Path
) -> None:
    corpus, dump = tmp_path / "a.jsonl", str(tmp_path / "dump")
    write(corpus, broken=True)
    errors = four_ranks.errors(train_on, str(corpus), [], dump)
    (message,) = set(errors)
    found = re.search(r"BadDataError: step (\d+): rank \d: (.*)", message)
    assert found, message
    last, text = int(found[1]) - 1, found[2]
    assert f"training.dataset_path: got '{corpus}:{BROKEN_LINE}', expected a JSON object" in text
    assert f"saved as {dump}/checkpoint/step-{last}" in text
    assert "training.allow_changed_corpus" in text and "training.max_bad_records" in text
    # Nothing else saves that early.
    assert 2 <= last < STEPS - 1

    write(corpus, broken=False)
    for error in four_ranks.errors(train_on, str(corpus), [], dump):
        assert "training.allow_changed_corpus = true" in error
    resumed = four_ranks.run(train_on, str(corpus), ["--training.allow_changed_corpus"], dump)[0]
    # The line that was cut was the end of its block: all positions are what they were.
    assert resumed["losses"] == whole


def test_bad_records_are_skipped_and_counted(four_ranks: RankPool, tmp_path: Path) -> None:
    corpus, dump = tmp_path / "a.jsonl", str(tmp_path / "dump")
    write(corpus, broken=True)
    allowed = ["--training.max_bad_records=1"]
    run = four_ranks.run(train_on, str(corpus), [*allowed, "--training.steps=8"], dump)[0]
    assert run["step"] == 8
    records = [json.loads(line) for line in (tmp_path / "dump/metrics.jsonl").open()]
    counts = [record["bad_records"] for record in records]
    assert counts[0] == 0 and counts[-1] == 1 and counts == sorted(counts)
    # A resumed run remembers, at another number of ranks too.
    more = [*allowed, "--parallelism.tensor_parallel_degree=4", "--training.local_batch_size=4"]
    assert four_ranks.run(train_on, str(corpus), more, dump)[0]["step"] == STEPS
    records = [json.loads(line) for line in (tmp_path / "dump/metrics.jsonl").open()]
    assert [record["bad_records"] for record in records[8:]] == [1] * (STEPS - 8)
