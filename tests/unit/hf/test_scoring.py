# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Scores of continuations against logits of each whole text alone, in fp64."""

import pytest
import torch

from tests.reference.validation_loss import token_losses
from tests.unit.tiny import FAMILIES, build_tiny, tokens
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.scoring import Pair, score_continuations

LENGTHS = [(5, 3), (1, 1), (20, 12), (21, 12), (40, 7), (2, 31), (9, 3)]
WINDOW = 32


def pairs_of(model):
    ids = tokens(model.model_args, b=len(LENGTHS), s=60).tolist()
    return [Pair(row[:c], row[c : c + n]) for row, (c, n) in zip(ids, LENGTHS, strict=True)]


def by_hand(model, pair):
    text = torch.tensor([*pair.context, *pair.continuation][-(WINDOW + 1) :])
    with torch.no_grad():
        (logits,) = model(text[None, :-1])
    count = len(pair.continuation)
    losses = token_losses(logits, text[1:])[-count:]
    return -losses.sum().item(), torch.equal(logits[-count:].argmax(1), text[-count:])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_scores_by_hand(family, batch_size):
    model = build_tiny(family, torch.float64).eval()
    pairs = pairs_of(model)
    found = score_continuations(model, pairs, batch_size)
    assert len(found) == len(pairs)
    for pair, score in zip(pairs, found, strict=True):
        expected, greedy = by_hand(model, pair)
        assert score == (pytest.approx(expected, rel=1e-12), greedy)


def test_the_greedy_continuation_is_known_as_such():
    model = build_tiny("cola", torch.float64).eval()
    text = tokens(model.model_args, b=1, s=6)
    for _ in range(4):
        with torch.no_grad():
            text = torch.cat((text, model(text)[:, -1:].argmax(-1)), 1)
    context, best = text[0, :6].tolist(), text[0, 6:].tolist()
    other = [*best[:-1], (best[-1] + 1) % model.model_args.vocab_size]
    scores = score_continuations(model, [Pair(context, best), Pair(context, other)])
    (first, is_greedy), (second, other_is) = scores
    assert (is_greedy, other_is) == (True, False) and first > second


@pytest.mark.parametrize(("context", "continuation"), [(1, 33), (0, 3), (4, 0)])
def test_what_does_not_fit_is_refused(context, continuation):
    model = build_tiny("full").eval()
    with pytest.raises(ConfigError, match=f"got '{context} and {continuation} tokens'"):
        score_continuations(model, [Pair([1] * context, [2] * continuation)])
