# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The losses that a finished run reports, against losses by hand from its own checkpoints."""

import copy
import json
import math
from collections import Counter
from functools import partial
from itertools import islice

import pytest
import torch

from tests.integration import runs
from tests.reference.validation_loss import sequence_losses, windows
from tests.support.run_folders import loaded
from torchtitan_lr.data.sources import Reader, Source

SEQ_LEN = 32
VALIDATED = 2 * 2 * 2  # ranks, batches, rows
BATCH = 2 * 2  # ranks, rows
SAVED = (4, 6)  # steps


@pytest.fixture(scope="module")
def logged(finished):
    """What was logged of a step, training and validation together."""
    steps = {}
    for record in runs.history(finished.folder):
        steps.setdefault(record["step"], {}).update(record)
    return steps


@pytest.fixture(scope="module")
def saved(finished):
    """Model and tokenizer of each saved step."""
    return {step: loaded(finished.folder / f"checkpoint/step-{step}") for step in SAVED}


def sequences(saved, held_out):
    """Sequences of the corpus in its order, without shuffling as the run reads it."""
    encode = partial(saved[6][1].encode, add_bos=True, add_eos=True)
    texts = islice(Reader(Source("python_stdlib")).texts(held_out), 8)
    return windows(map(encode, texts), SEQ_LEN)


def losses_by_hand(saved, step, rows, dtype=torch.float64):
    return sequence_losses(copy.deepcopy(saved[step][0]).to(dtype), rows)


def assert_logged(logged, saved, step, rows, others):
    """Compares a logged loss with that of a step's weights on some sequences, and no others.

    The run computes in bf16. The limit is what that does to the loss of one token, in the mean and
    without signs, when the same weights see the same sequences in bf16 here. The mean over many
    tokens, with signs, is less off.
    """
    exact = losses_by_hand(saved, step, rows)
    limit = (losses_by_hand(saved, step, rows, torch.bfloat16) - exact).abs().mean().item()
    assert logged == pytest.approx(exact.mean().item(), abs=limit)
    for other in others:
        assert abs(losses_by_hand(saved, *other).mean() - exact.mean()) > 10 * limit


@pytest.mark.parametrize("step", SAVED)
def test_validation_loss(step, logged, saved):
    found = sequences(saved, held_out=True)
    validated, following = found[:VALIDATED], found[VALIDATED : 2 * VALIDATED]
    others = [(sum(SAVED) - step, validated), (step, following)]
    assert_logged(logged[step]["validation_metrics/loss"], saved, step, validated, others)


def test_unigram_entropy(finished, saved):
    validated = sequences(saved, held_out=True)[:VALIDATED]
    labels = [token for sequence in validated for token in sequence[1:]]
    shares = [count / len(labels) for count in Counter(labels).values()]
    expected = -sum(share * math.log(share) for share in shares)
    summary = json.loads((finished.folder / "summary.json").read_text())
    assert summary["unigram_entropy"] == pytest.approx(expected, rel=1e-12)  # fp64, 200 terms


def test_training_loss(logged, saved):
    """The loss of step 5 is that of step 4's weights on the fifth batch, which one rank reads."""
    rows = sequences(saved, held_out=False)
    batches = [rows[start : start + BATCH] for start in range(0, 6 * BATCH, BATCH)]
    others = [(4, batches[3]), (4, batches[5])]
    assert_logged(logged[5]["loss_metrics/global_avg_loss"], saved, 4, batches[4], others)
