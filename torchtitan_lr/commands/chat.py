# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A conversation with a model, in the form in which fine-tuning on chats shows it conversations."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from torchtitan_lr.data.pairs import MESSAGES, PairEncoder
from torchtitan_lr.hf.generation import Settings, continue_ids, max_new_tokens

Message = dict[str, str]


def converse(
    model: Any,
    tokenizer: Any,
    window: int,
    limit: int,
    settings: Settings,
    seed: int,
    ask: Callable[[], str | None],
    write: Callable[[str], Any],
) -> list[Message]:
    """Answer message after message, each in view of those before it.

    Tokens are those of training: the tokenizer's chat template, or the plain form where there is
    none. An answer ends with EOS or with what the template writes behind answers. What does not
    fit in the trained window is forgotten, the oldest question and its answer first.

    Args:
        model: Result of `hf.generation.build_generator`.
        tokenizer: Its tokenizer.
        window: Length of the sequences that the model was trained on.
        limit: Most tokens of an answer.
        settings: How answers are drawn.
        seed: Answer i has ``seed + i``.
        ask: Returns the next message, None after the last one.
        write: Called with the pieces of an answer, then with a line break.

    Returns:
        The messages that the next answer would see.

    Raises:
        ConfigError: A message alone does not fit in the window, or the template is not usable.
    """
    encoder = PairEncoder(tokenizer)
    # An answer ends at the template's mark, such as ``<|im_end|>``.
    mark = encoder.end_mark()
    ids = tokenizer.encode_text(mark, special=True).ids
    if ids and tokenizer.decode(ids[:1]):
        settings = replace(settings, stops=[*settings.stops, mark])
    elif ids:  # special tokens have no text
        settings = replace(settings, stop_ids=ids[:1])
    messages: list[Message] = []
    while (question := ask()) is not None:
        messages.append({"role": "user", "content": question})
        while True:
            record = {MESSAGES: [*messages, {"role": "assistant", "content": ""}]}
            tokens = encoder.encode(json.dumps(record), answered=False)
            ids = np.maximum(tokens, ~tokens).tolist()  # complements are no labels
            if len(ids) + limit <= window or len(messages) == 1:
                break
            del messages[:2]
        # With nothing left to forget: a shorter answer, or none.
        most = min(limit, max_new_tokens(window, len(ids), "message"))
        answer = continue_ids(model, tokenizer, ids, most, settings, seed, write)
        write("\n")
        messages.append({"role": "assistant", "content": answer.text})
        seed += 1
    return messages
