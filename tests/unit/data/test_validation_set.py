# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The validation set: each sequence once for any dp size, and an exact unigram entropy."""

import itertools
import json
import math
from collections import Counter

import pytest
import torch

from torchtitan_lr.data.corpora import PythonStdlib
from torchtitan_lr.data.dataloader import build_dataloader
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.data.validation import build_validation_set, entropy
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.titan import IGNORE_INDEX
from torchtitan_lr.titan.base import JobConfig

pytestmark = pytest.mark.usefixtures("small_library")


def config(batch=3, steps=-1, seq_len=64, dataset="python_stdlib", path=None):
    job = JobConfig()
    job.model.hf_assets_path = "torchtitan_lr/data/assets/bpe4k"
    section = job.validation
    section.dataset, section.dataset_path = dataset, path
    section.local_batch_size, section.steps, section.seq_len = batch, steps, seq_len
    return job


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(config())


@pytest.fixture(scope="module")
def stream(tokenizer, small_library):
    """All tokens of the held-out files, in order."""
    tokens = []
    for text in PythonStdlib("validation", "k"):
        tokens += tokenizer.encode(text, add_bos=True, add_eos=True)
    return tokens


def valid_rows(batches):
    """Rows with labels, as windows of s + 1 tokens; checks that a row is all label or none."""
    rows = []
    for inputs, labels in batches:
        for x, y in zip(inputs["input"].tolist(), labels.tolist(), strict=True):
            if y[0] == IGNORE_INDEX:
                assert set(y) == {IGNORE_INDEX} and set(x) == {0}
            else:
                assert x[1:] == y[:-1]
                rows.append([*x, y[-1]])
    return rows


# The last has fewer sequences than ranks.
@pytest.mark.parametrize(("dp", "seq_len"), [(1, 64), (2, 64), (3, 64), (4, 64), (16, 400)])
def test_every_sequence_is_on_one_rank(tokenizer, stream, dp, seq_len):
    expected = [stream[i : i + seq_len + 1] for i in range(0, len(stream) - seq_len, seq_len + 1)]
    sets = [
        build_validation_set(config(seq_len=seq_len), dp, rank, tokenizer) for rank in range(dp)
    ]
    batches = [list(one) for one in sets]
    assert (
        {len(b) for b in batches}
        == {len(one) for one in sets}
        == {math.ceil(math.ceil(len(expected) / dp) / 3)}
    )
    for inputs, labels in (batch for rank in batches for batch in rank):
        assert inputs["input"].shape == labels.shape == (3, seq_len)
        assert inputs["input"].dtype == labels.dtype == torch.int64
    rows = [valid_rows(b) for b in batches]
    for rank in range(dp):
        assert rows[rank] == expected[rank::dp]
    assert {one.num_tokens for one in sets} == {len(expected) * seq_len}
    if dp == 16:
        assert len(expected) < dp
    labels = sum((labels != IGNORE_INDEX).sum() for b in batches for _, labels in b)
    assert labels == sets[0].num_tokens


def test_entropy_is_that_of_the_labels(tokenizer, stream):
    seq_len = 100
    labels = []
    for i in range(0, len(stream) - seq_len, seq_len + 1):
        labels += stream[i + 1 : i + seq_len + 1]
    counts = Counter(labels)
    direct = -sum(n / len(labels) * math.log(n / len(labels)) for n in counts.values())
    for dp, rank in [(1, 0), (3, 2)]:
        built = build_validation_set(config(seq_len=seq_len), dp, rank, tokenizer)
        assert built.unigram_entropy == pytest.approx(direct, abs=1e-12)
        assert built.num_tokens == len(labels)
    # Negative control: counting a window's first token too would be another number.
    everything = Counter(stream)
    other = entropy(torch.tensor(list(everything.values())))
    assert abs(other - direct) > 1e-4


def test_the_default_is_what_training_holds_out(tokenizer, tmp_path):
    lines = [f"document {i} of many, with some words" for i in range(300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    job = config(2, -1, 64, "training")
    job.training.dataset, job.training.dataset_path = "local", str(tmp_path)
    job.training.seq_len, job.training.local_batch_size, job.training.global_batch_size = 64, 4, 4

    def texts(windows):
        """The documents that lie in one window as a whole."""
        pieces = (piece for w in windows for piece in tokenizer.decode(w).split("document ")[1:])
        return {f"document {piece}" for piece in pieces} & set(lines)

    held = texts(valid_rows(build_validation_set(job, 1, 0, tokenizer)))
    assert len(held) >= 20
    loader = build_dataloader(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=job)
    trained = texts(
        [*x, y[-1]]
        for inputs, labels in itertools.islice(loader, 400)
        for x, y in zip(inputs["input"].tolist(), labels.tolist(), strict=True)
    )
    assert len(trained) > 150 and not trained & held
    # Control: the corpus as a whole has both.
    job.validation.dataset, job.validation.dataset_path = "local", str(tmp_path)
    whole = texts(valid_rows(build_validation_set(job, 1, 0, tokenizer)))
    assert whole & held and whole & trained


def test_local_validation_and_a_corpus_that_is_too_short(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("a few words only, not many\n")
    job = config(2, -1, 4, "local", str(tmp_path))
    built = build_validation_set(job, 3, 0, tokenizer)
    assert built.num_tokens > 0
    with pytest.raises(ConfigError) as error:
        build_validation_set(config(2, -1, 400, "local", str(tmp_path)), 1, 0, tokenizer)
    text = str(error.value)
    assert "validation.seq_len: got 400" in text and "'local'" in text and "\n" not in text
