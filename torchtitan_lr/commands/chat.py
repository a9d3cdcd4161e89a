# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A conversation with a model, in the form in which fine-tuning on chats shows it conversations."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from torchtitan_lr.data.pairs import MESSAGES, PairEncoder
from torchtitan_lr.inference.completion import SEEDS, USUAL_NEW_TOKENS, Settings, complete_batch
from torchtitan_lr.inference.decode import max_new_tokens
from torchtitan_lr.models.llama import LlamaModel

Message = dict[str, str]


def converse(
    model: LlamaModel,
    tokenizer: Any,
    settings: Settings,
    ask: Callable[[], str | None],
    write: Callable[[str], Any],
) -> list[Message]:
    """Answer message after message, each in view of those before it.

    Tokens are those of training: the tokenizer's chat template, or the plain form where there is
    none. An answer ends with EOS or with what the template writes behind answers. What does not
    fit in the trained window is forgotten, the oldest question and its answer first.

    Args:
        model: The model, on one device.
        tokenizer: Its tokenizer.
        settings: How answers are drawn; answer i has ``seed + i``.
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
    if ids and tokenizer.decode(ids[:1], skip_special_tokens=True):
        settings = replace(settings, stops=[*settings.stops, mark])
    elif ids:  # special tokens have no text
        settings = replace(settings, stop_ids=[*settings.stop_ids, ids[0]])
    messages: list[Message] = []
    while (question := ask()) is not None:
        messages.append({"role": "user", "content": question})
        limit = settings.max_new_tokens or USUAL_NEW_TOKENS
        while True:
            record = {MESSAGES: [*messages, {"role": "assistant", "content": ""}]}
            tokens = encoder.encode(json.dumps(record), answered=False)
            ids = np.maximum(tokens, ~tokens).tolist()  # complements are no labels
            if len(ids) + limit <= model.model_args.max_seq_len:
                break
            if len(messages) == 1:  # nothing to forget: a shorter answer, or none
                limit = min(limit, max_new_tokens(model.model_args, len(ids), "message"))
                break
            del messages[:2]
        row = ("", ids, limit, settings.seed % SEEDS)
        (answer,) = complete_batch(model, tokenizer, [row], settings, write)
        write("\n")
        messages.append({"role": "assistant", "content": answer.text})
        settings = replace(settings, seed=settings.seed + 1)
    return messages
