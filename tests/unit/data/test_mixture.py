# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Mixtures: the shares, the same batches at any split, exact resume, refusals in one line."""

import json

import numpy as np
import pytest
import torch

from tests.unit.data.test_dataloader import ROWS, SEQ, steps, union
from tests.unit.data.test_dataloader import tokenizer as tokenizer
from tests.unit.data.test_order import build, options
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data.checks import check_corpus, check_sequences
from torchtitan_lr.data.corpora import training_source, validation_source
from torchtitan_lr.data.validation import build_validation_set
from torchtitan_lr.errors import ConfigError

WEIGHTS = {"a": 3, "b": 1.5, "c": 0.5}


@pytest.fixture
def entries(tmp_path):
    """Three corpora, each of one letter."""
    found = []
    for letter, weight in WEIGHTS.items():
        texts = [f"{letter} " * (20 + i % 30) for i in range(200)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (tmp_path / f"{letter}.jsonl").write_text("".join(lines))
        path = str(tmp_path / f"{letter}.jsonl")
        found.append({"dataset": "local", "path": path, "weight": weight, "name": letter})
    return found


def mixed(entries, shuffle=True, local=ROWS):
    job = options(shuffle=shuffle, local=local)
    job.training.mixture, job.training.dataset_path = entries, None
    return job


def letters(tokenizer, batches):
    """Which corpus each row of (n, rows, seq) inputs is of."""
    texts = [[tokenizer.decode(row.tolist()) for row in step] for step in batches]
    kinds = [[{c for c in text if c in "abc"} for text in step] for step in texts]
    assert all(len(kind) == 1 for step in kinds for kind in step)
    return np.array([[next(iter(kind)) for kind in step] for step in kinds])


@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_resume_and_split(tokenizer, entries, shuffle):
    loader = build(tokenizer, 1, mixed(entries, shuffle))[0]
    batches = steps([loader], ROWS, 60)
    kinds = letters(tokenizer, batches[0])
    for letter, weight in WEIGHTS.items():
        assert (kinds == letter).mean() == pytest.approx(weight / 5, abs=0.02)
        counts = (kinds == letter).sum(1)  # each batch is mixed, not only their sum
        assert counts.max() - counts.min() <= 2
        assert loader.shares()[f"data_share/{letter}"] == pytest.approx((kinds == letter).mean())
    assert all(len(set(row)) == 3 for row in kinds.T)  # each row is of every corpus in turn

    saved = build(tokenizer, 4, mixed(entries, shuffle, local=1))
    assert torch.equal(steps(saved, 1, 23), batches[:, :23])
    state = union(saved)
    again = build(tokenizer, 2, mixed(entries, shuffle, local=2))
    for one in again:
        one.load_state_dict(state)
    assert torch.equal(steps(again, 2, 37), batches[:, 23:])
    assert {tuple(one.shares().values()) for one in again} == {tuple(loader.shares().values())}


def test_the_marked_counts_are_those_to_save(tokenizer, entries):
    """A step that is undone has not been read: neither its rows nor its shares."""
    loader = build(tokenizer, 1, mixed(entries))[0]
    steps([loader], ROWS, 3)
    before = loader.state_dict()
    counts = json.loads(before["lane_0"])["seen"]
    loader.mark()
    steps([loader], ROWS, 2)
    assert json.loads(loader.state_dict()["lane_0"])["seen"] != counts  # the control
    loader.return_to_mark()
    assert json.loads(loader.state_dict()["lane_0"])["seen"] == counts
    assert loader.state_dict() == before


def test_a_position_of_one_part_matters(tokenizer, entries):
    """Negative control: the parts' positions and the number of windows are used on resume."""
    loader = build(tokenizer, 1, mixed(entries, False))[0]
    steps([loader], ROWS, 7)
    state = loader.state_dict()
    expected = steps([loader], ROWS, 9)
    start = {"document": None, "offset": 0}
    for change in ({"taken": 8}, {"parts": [start] * 3}):
        again = build(tokenizer, 1, mixed(entries, False))[0]
        tampered = json.loads(state["lane_0"]) | change
        again.load_state_dict(state | {"lane_0": json.dumps(tampered)})
        assert not torch.equal(steps([again], ROWS, 9), expected)


def test_held_out_parts_are_validated_and_checked(tokenizer, entries):
    config = build_job_config(["--validation.enable"])
    config.training.mixture = entries
    config.training.seq_len = config.validation.seq_len = SEQ
    check_corpus(config)
    check_sequences(config, tokenizer)
    trained, held = set(training_source(config).open()), set(validation_source(config).open())
    assert {text[0] for text in trained} == {text[0] for text in held} == set("abc")
    assert not trained & held
    rows = build_validation_set(config, 1, 0, tokenizer)
    assert rows.num_sequences > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": 0}, "mixture[1].weight: got 0, expected a positive number"),
        ({"weight": "x"}, "mixture[1].weight: got 'x', expected a number"),
        ({"wieght": 1}, "mixture[1].wieght: got 1, expected one of the keys dataset, path"),
        ({"name": "a"}, "training.mixture: got ['a', 'a', 'c'], expected entries with different"),
        ({"dataset": "locl"}, "training.dataset: got 'locl', expected one of"),
        ({"path": "/nowhere"}, "training.dataset_path: got '/nowhere', expected an existing"),
    ],
)
def test_bad_entries_are_refused(entries, change, message):
    entries[1] |= change
    config = build_job_config([])
    config.training.mixture = entries
    with pytest.raises(ConfigError) as error:
        check_corpus(config)
    assert message in str(error.value) and "\n" not in str(error.value)
