# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The validation loss of one process against a loss computed by hand, in fp64.

Five sequences of three tokens in batches of two: the last batch is half padding. The model is a
table of bigram logits, so that a token's loss is one line of arithmetic.
"""

import json
import math
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.corpora import write_corpus
from torchtitan_lr.compat.fake import fake_process_group
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.ends import cross_entropy_sum
from torchtitan_lr.titan.base import BaseTokenizer, ParallelDims
from torchtitan_lr.titan.device import bind_device
from torchtitan_lr.training.metrics import LowRankMetricsProcessor
from torchtitan_lr.training.validate import Validator

BEGIN, END = 0, 1
DOCUMENTS = ["cdef", "c", "ghfedc", "hgc"]
# 22 ids: five windows of 4, and two ids too few for a sixth.
WINDOWS = [
    [BEGIN, 2, 3, 4],
    [5, END, BEGIN, 2],
    [END, BEGIN, 6, 7],
    [5, 4, 3, 2],
    [END, BEGIN, 7, 6],
]
VOCABULARY = 8
TABLE = torch.randn(
    VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3), dtype=torch.float64
).mul(2)
# Sums of a dozen fp64 numbers: rounding is below 1e-15, and the nearest wrong mean is 1e-3 away.
EXACT = 1e-12


class Letters(BaseTokenizer):
    """Ids 2 to 7 are the letters c to h."""

    def encode(self, text, add_bos=True, add_eos=True):
        ids = [ord(letter) - ord("a") for letter in text]
        return [BEGIN] * add_bos + ids + [END] * add_eos

    def decode(self, ids):
        raise NotImplementedError

    def get_vocab_size(self):
        return VOCABULARY


class Bigrams(nn.Module):
    """Notes in which mode it was called."""

    model_args = SimpleNamespace(vocab_size=VOCABULARY)

    def __init__(self):
        super().__init__()
        self.modes = []

    def forward(self, tokens, **_):
        self.modes.append(self.training)
        return TABLE.to(tokens.device)[tokens]


def losses_by_hand(window):
    """-log p(next | this) of a window's tokens."""
    losses = []
    for this, following in pairwise(window):
        row = TABLE[this].tolist()
        losses.append(math.log(sum(math.exp(logit) for logit in row)) - row[following])
    return losses


def mean(values):
    return sum(values) / len(values)


@pytest.fixture(autouse=True)
def process_group():
    with fake_process_group(1):
        yield


@pytest.fixture
def validator_of(tmp_path):
    """Builds the validator of one of D ranks that share the corpus; it reduces with nobody."""
    bind_device()
    held_out = [Letters().encode(text, True, True) for text in DOCUMENTS]
    write_corpus(tmp_path / "corpus", [[[1] * 9]], [held_out])

    def build():
        job = build_job_config([])
        job.job.dump_folder = str(tmp_path)
        job.training.steps = 7
        section = job.validation
        job.training.dataset, job.training.dataset_path = "prepared", str(tmp_path / "corpus")
        section.seq_len, section.local_batch_size, section.steps = 3, 2, -1
        dims = ParallelDims(1, 1, 1, 1, 1, 1, 1, world_size=1)
        processor = LowRankMetricsProcessor(job, dims)
        return Validator(job, 1, 0, dims, cross_entropy_sum, nullcontext, processor)

    return build


def test_a_validation_set_without_a_label_is_refused_in_one_line(validator_of, tmp_path):
    """Of pairs whose answers lie behind the sequence length, say."""
    held_out = [[BEGIN, 2, 3, 4]] * 3
    write_corpus(tmp_path / "corpus", [[[1] * 9]], [held_out], masks=[[[1] * 9], [[0] * 4] * 3])
    validator = validator_of()
    with pytest.raises(ConfigError, match=r"^validation.dataset: got .* every one here is ignored"):
        validator.validate([Bigrams()], step=7)
    assert validator.last_loss is None


def record(validator):
    (line,) = validator.metrics_processor.history.path.read_text().splitlines()
    return json.loads(line)


def test_loss_by_hand(validator_of):
    validator, model = validator_of(), Bigrams()
    validator.validate([model], step=7)
    losses = [loss for window in WINDOWS for loss in losses_by_hand(window)]
    expected = mean(losses)
    assert validator.last_loss == pytest.approx(expected, rel=EXACT)
    # What is logged, and what goes with it.
    logged = record(validator)
    labels = [token for window in WINDOWS for token in window[1:]]
    shares = [labels.count(token) / 15 for token in set(labels)]
    assert logged["step"] == 7
    assert logged["validation_metrics/loss"] == validator.last_loss
    assert logged["validation_metrics/perplexity"] == pytest.approx(math.e**expected, rel=EXACT)
    assert logged["validation_metrics/tokens"] == 15
    assert logged["validation_metrics/seconds"] > 0
    assert logged["validation_metrics/unigram_entropy"] == pytest.approx(
        -sum(share * math.log(share) for share in shares), rel=EXACT
    )
    # Three batches, and training goes on afterwards.
    assert model.modes == [False, False, False] and model.training
    # Control: what could be taken for the loss is another number.
    batches = [mean(losses[:6]), mean(losses[6:12]), mean(losses[12:])]
    of_padding = losses_by_hand([0, 0]) * 3
    for wrong in (
        mean(batches),
        sum(batches) / 4,
        mean(losses[:12]),
        sum(losses) / 18,
        mean(losses + of_padding),
    ):
        assert abs(wrong / expected - 1) > 1e-3
