# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Text of a growing sequence of tokens, piece by piece, up to a stop string."""

from collections.abc import Sequence
from typing import Any

_CONTEXT = 8
"""Last tokens of the prompt that are decoded again: some decoders drop a leading space."""

_UNKNOWN = "\ufffd"
"""The character that decoders return for bytes that are not (yet) a character."""


class TextStream:
    """Decodes a continuation token by token, in constant time per token.

    A piece of text is given out as soon as it can no longer change: its last character is
    complete, and it is not the beginning of a stop string.

    Args:
        tokenizer: Decodes token ids.
        prompt: Token ids of the prompt.
        stops: Strings that end the text; the text does not include them.

    Attributes:
        stopped: Whether a stop string was found; nothing is given out after it.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._decoded = len(self._ids)  # ids that are text already
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token: int | None) -> str:
        """Append a token, or None after the last one; return the text that is now certain."""
        if self.stopped:
            return ""
        self._ids += [] if token is None else [token]
        ids = (self._ids[: self._decoded], self._ids)
        known, text = (self._tokenizer.decode(part, skip_special_tokens=True) for part in ids)
        if text.endswith(_UNKNOWN) and token is not None:
            text = self._held  # the last character is not whole
        else:
            # The tokens of this piece are the context of the next one.
            self._ids = self._ids[self._decoded :] or self._ids
            self._decoded = len(self._ids)
            text = self._held + text[len(known) :]
        places = [place for place in map(text.find, self._stops) if place >= 0]
        if places:
            self.stopped = True
            return str(text[: min(places)])
        # The end of the text may be the beginning of a stop string, unless nothing follows.
        held = 0
        for stop in self._stops:
            for n in range(1, len(stop)):
                if text.endswith(stop[:n]):
                    held = max(held, n)
        end = len(text) - held * (token is not None)
        self._held = text[end:]
        return str(text[:end])
