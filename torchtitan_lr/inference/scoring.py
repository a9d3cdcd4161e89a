# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Log-likelihoods of continuations, as tasks with several choices compare them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.llama import LlamaModel


@dataclass(frozen=True)
class Score:
    """The score of a continuation.

    Attributes:
        log_likelihood: Sum of log p over its tokens, in nats.
        greedy: Whether every token of it is the most likely one.
    """

    log_likelihood: float
    greedy: bool


@dataclass(frozen=True)
class Pair:
    """Token ids of a context, at least one, and of a continuation, at least one."""

    context: Sequence[int]
    continuation: Sequence[int]


def score_continuations(
    model: LlamaModel, pairs: Sequence[Pair], batch_size: int = 8
) -> list[Score]:
    """Score continuations in batches of similar lengths.

    What is longer than the trained window loses its beginning: the context slides.

    Args:
        model: The model, on one device.
        pairs: What to score.
        batch_size: Pairs that are read together.

    Returns:
        The scores, in the order of the pairs. They do not depend on the batch, but for rounding.

    Raises:
        ConfigError: A continuation does not fit the window, or a pair lacks a part.
    """
    rows = [_window(pair, model.model_args.max_seq_len) for pair in pairs]
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    scores: dict[int, Score] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        lengths = [len(pairs[index].continuation) for index in batch]
        found = _score_batch(model, [rows[index] for index in batch], lengths)
        scores |= dict(zip(batch, found, strict=True))
    return [scores[index] for index in range(len(rows))]


def _window(pair: Pair, window: int) -> list[int]:
    """Return the tokens to read and the last one, which is only predicted."""
    length = len(pair.continuation)
    if not 0 < length <= window or not pair.context:
        got = f"{len(pair.context)} and {length} tokens"
        want = f"a context, and a continuation of 1 to {window} tokens (the trained window)"
        raise ConfigError("context and continuation", got, want)
    return [*pair.context, *pair.continuation][-(window + 1) :]


@torch.inference_mode()
def _score_batch(model: LlamaModel, rows: list[list[int]], lengths: list[int]) -> list[Score]:
    device = model.freqs_cis.device
    # Padding on the right: no position attends to what follows it.
    inputs = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.int64)
    for index, row in enumerate(rows):
        inputs[index, : len(row) - 1] = torch.tensor(row[:-1])
    logits = model(inputs.to(device))
    scores = []
    for row, length, of_row in zip(rows, lengths, logits, strict=True):
        wanted = torch.tensor(row[-length:], device=device)
        kept = of_row[len(row) - 1 - length : len(row) - 1]
        kept = kept.to(torch.promote_types(kept.dtype, torch.float32)).log_softmax(-1)
        chosen = kept.gather(-1, wanted[:, None]).double().sum()
        scores.append(Score(chosen.item(), torch.equal(kept.argmax(-1), wanted)))
    return scores
