# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The losses that a finished run reports, against losses by hand from its own checkpoints."""

import json
import math
from collections import Counter
from functools import cache, partial
from itertools import islice

import pytest
import torch

from tests.integration import runs
from tests.reference.validation_loss import sequence_losses, windows
from torchtitan_lr.data.sources import Reader, Source
from torchtitan_lr.data.tokenizer import build_tokenizer
from torchtitan_lr.training.loading import as_model, build_model_args, load_weights, read_run_config

SEQ_LEN = 32
VALIDATED = 2 * 2 * 2  # ranks, batches, rows
BATCH = 2 * 2  # ranks, rows
SAVED = (4, 6)  # steps

VALIDATION = "validation_metrics/loss"
TRAINING = "loss_metrics/global_avg_loss"


@pytest.fixture(scope="module")
def folder(finished):
    return finished.folder


@pytest.fixture(scope="module")
def logged(folder):
    """What was logged of a step, training and validation together."""
    steps = {}
    for record in runs.history(folder):
        steps.setdefault(record["step"], {}).update(record)
    return steps


@pytest.fixture(scope="module")
def tokenizer(folder):
    return build_tokenizer(read_run_config(folder / "checkpoint" / "step-6").model.hf_assets_path)


@pytest.fixture(scope="module")
def held_out(tokenizer):
    """The sequences that the run validates on, and as many that follow them."""
    encode = partial(tokenizer.encode, add_bos=False, add_eos=False)
    found = islice(Reader(Source("python_stdlib")).texts(held_out=True), 8)
    documents = [[tokenizer.bos_id, *encode(text), tokenizer.eos_id] for text in found]
    sequences = windows(documents, SEQ_LEN)
    return sequences[:VALIDATED], sequences[VALIDATED : 2 * VALIDATED]


@pytest.fixture(scope="module")
def losses_by_hand(folder):
    """Computes the losses of a saved step's weights on some sequences, in fp64 by default."""

    @cache
    def model(step, dtype):
        path = folder / "checkpoint" / f"step-{step}"
        args = build_model_args(read_run_config(path))
        return as_model(args, load_weights(path, args)).to(dtype)

    def compute(step, sequences, dtype=torch.float64):
        return sequence_losses(model(step, dtype), sequences)

    return compute


def assert_logged(logged, losses_by_hand, step, sequences, others):
    """Compares a logged loss with that of a step's weights on some sequences, and no others.

    The run computes in bf16. The limit is what that does to the loss of one token, in the mean and
    without signs, when the same weights see the same sequences in bf16 here. The mean over many
    tokens, with signs, is less off.
    """
    exact = losses_by_hand(step, sequences)
    limit = (losses_by_hand(step, sequences, torch.bfloat16) - exact).abs().mean().item()
    assert logged == pytest.approx(exact.mean().item(), abs=limit)
    for other in others:
        assert abs(losses_by_hand(*other).mean() - exact.mean()) > 10 * limit


@pytest.mark.parametrize("step", SAVED)
def test_validation_loss(step, folder, logged, held_out, losses_by_hand):
    validated, following = held_out
    assert len(following) == VALIDATED
    others = [(sum(SAVED) - step, validated), (step, following)]
    assert_logged(logged[step][VALIDATION], losses_by_hand, step, validated, others)
    if step == SAVED[-1]:
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["val_loss"] == logged[step][VALIDATION]


def test_unigram_entropy(folder, held_out):
    labels = [token for sequence in held_out[0] for token in sequence[1:]]
    shares = [count / len(labels) for count in Counter(labels).values()]
    expected = -sum(share * math.log(share) for share in shares)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["unigram_entropy"] == pytest.approx(expected, rel=1e-12)  # fp64, 200 terms


def test_training_loss(logged, tokenizer, losses_by_hand):
    """The loss of step 5 is that of step 4's weights on the fifth batch, which one rank reads."""
    # The run reads its corpus from the start to the end.
    encode = partial(tokenizer.encode, add_bos=True, add_eos=True)
    documents = map(encode, islice(Reader(Source("python_stdlib")).texts(held_out=False), 8))
    rows = windows(documents, SEQ_LEN)
    batches = [rows[start : start + BATCH] for start in range(0, 6 * BATCH, BATCH)]
    others = [(4, batches[3]), (4, batches[5])]
    assert_logged(logged[5][TRAINING], losses_by_hand, 4, batches[4], others)
