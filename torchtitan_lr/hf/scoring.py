# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Log-likelihoods of continuations, as tasks with several choices compare them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.llama import LlamaModel


class Pair(NamedTuple):
    """Token ids of a context, at least one, and of a continuation, at least one."""

    context: Sequence[int]
    continuation: Sequence[int]


@torch.inference_mode()
def score_continuations(
    model: LlamaModel, pairs: Sequence[Pair], batch_size: int = 8
) -> list[tuple[float, bool]]:
    """Score continuations in batches of similar lengths.

    What is longer than the trained window loses its beginning: the context slides.

    Args:
        model: The model, on one device.
        pairs: What to score.
        batch_size: Pairs that are read together.

    Returns:
        The sum of log p over a continuation's tokens, in nats, and whether every token of it is the
        most likely one, in the order of the pairs. They do not depend on the batch, but for
        rounding.

    Raises:
        ConfigError: A continuation does not fit the window, or a pair lacks a part.
    """
    window, device = model.model_args.max_seq_len, model.freqs_cis.device
    for pair in pairs:
        if not 0 < len(pair.continuation) <= window or not pair.context:
            got = f"{len(pair.context)} and {len(pair.continuation)} tokens"
            want = f"a context, and a continuation of 1 to {window} tokens (the trained window)"
            raise ConfigError("context and continuation", got, want)
    # The tokens to read and the last one, which is only predicted.
    rows = [[*pair.context, *pair.continuation][-(window + 1) :] for pair in pairs]
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    scores: dict[int, tuple[float, bool]] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        # Padding on the right: no position attends to what follows it.
        inputs = torch.zeros(len(batch), len(rows[batch[0]]) - 1, dtype=torch.int64)
        for place, index in enumerate(batch):
            inputs[place, : len(rows[index]) - 1] = torch.tensor(rows[index][:-1])
        for index, logits in zip(batch, model(inputs.to(device)), strict=True):
            row, length = rows[index], len(pairs[index].continuation)
            wanted = torch.tensor(row[-length:], device=device)
            kept = logits[len(row) - 1 - length : len(row) - 1]
            kept = kept.to(torch.promote_types(kept.dtype, torch.float32)).log_softmax(-1)
            chosen = kept.gather(-1, wanted[:, None]).double().sum()
            scores[index] = chosen.item(), torch.equal(kept.argmax(-1), wanted)
    return [scores[index] for index in range(len(rows))]
