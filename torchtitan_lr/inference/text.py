# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Text of a growing sequence of tokens, piece by piece, up to a stop string."""

from collections.abc import Sequence
from typing import Any

_CONTEXT = 8
"""Last tokens of the prompt that are decoded again: some decoders drop a leading space."""

_UNKNOWN = "\ufffd"
"""What decoders give for bytes that are not (yet) a character."""


class TextStream:
    """Decodes a continuation token by token, in constant time per token.

    A piece of text is given out as soon as it can no longer change: its last character is
    complete, and it is not the beginning of a stop string.

    Args:
        tokenizer: Decodes token ids.
        prompt: Token ids of the prompt.
        stops: Strings that end the text; they are not part of it.

    Attributes:
        stopped: Whether a stop string was found; nothing is given out after it.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._decoded = len(self._ids)  # how many of them are text already
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Append a token and return the text that is now certain."""
        self._ids.append(token)
        return self._give_out(self._new_text())

    def finish(self) -> str:
        """Return the rest of the text: there will be no more tokens."""
        if self.stopped:
            return ""
        text = self._give_out(self._new_text(last=True))
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _new_text(self, last: bool = False) -> str:
        """Return the text of the tokens that are not text yet, if its last character is whole."""
        ids = (self._ids[: self._decoded], self._ids)
        known, text = (self._tokenizer.decode(part, skip_special_tokens=True) for part in ids)
        if text.endswith(_UNKNOWN) and not last:
            return ""
        # The tokens of this piece are the context of the next one.
        self._ids = self._ids[self._decoded :] or self._ids
        self._decoded = len(self._ids)
        return str(text[len(known) :])

    def _give_out(self, text: str) -> str:
        """Return the text up to a stop string, or without the beginning of one at its end."""
        if self.stopped:
            return ""
        text = self._held + text
        places = [place for place in map(text.find, self._stops) if place >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        begins = (stop[:n] for stop in self._stops for n in range(1, len(stop)))
        held = max((len(begin) for begin in begins if text.endswith(begin)), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
