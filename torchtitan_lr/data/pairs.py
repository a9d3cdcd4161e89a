# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pairs and chats for fine-tuning, with loss on the answers alone.

A record is ``{"prompt": ..., "completion": ...}`` or ``{"messages": [...]}``. It is checked and
made canonical JSON where it is read, and encoded where it is prepared. A token that is no label is
encoded as its complement ``~t``, which is negative; on disk the two are tokens and a loss mask.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchtitan_lr.data.chat_template import ChatTemplate, Segment

if TYPE_CHECKING:
    from torchtitan_lr.titan.base import BaseTokenizer

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]
"""The ids of one document, BOS and EOS included: ``(n,)``, of any integer type."""

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"
ROLES = ("system", "user", "assistant")

_EXPECTED = f'a JSON object with strings "{PROMPT}" and "{COMPLETION}", or with "{MESSAGES}"'


def is_pair(record: Any) -> bool:
    """Return whether a JSON value is meant as a pair or a chat, valid or not."""
    named = isinstance(record, dict) and "text" not in record
    return named and (PROMPT in record or MESSAGES in record)


def parse_pair(record: Any) -> str:
    """Check a record.

    Raises:
        ValueError: It is not a pair or a chat; the message is what was expected.
    """
    if not isinstance(record, dict):
        raise ValueError(_EXPECTED)
    if MESSAGES in record:
        found: dict[str, Any] = {MESSAGES: _parse_messages(record[MESSAGES])}
    else:
        found = {name: record.get(name) for name in (PROMPT, COMPLETION)}
        if not all(isinstance(text, str) for text in found.values()):
            raise ValueError(_EXPECTED)
        if not found[COMPLETION].strip():
            raise ValueError(f'a "{COMPLETION}" that is not empty')
    text = json.dumps(found, ensure_ascii=False, sort_keys=True)
    # JSON can encode a lone surrogate, which tokenizers reject.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _parse_messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'a list of messages in "{MESSAGES}"')
    found: list[dict[str, str]] = []
    for index, message in enumerate(messages):
        place = f"in message {index + 1}"
        parts = message if isinstance(message, dict) else {}
        role, content = parts.get("role"), parts.get("content")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f'a "content" that is not empty {place}')
        if role not in ROLES:
            raise ValueError(f"a role of {', '.join(ROLES)} {place}, not {role!r}")
        before = found[-1]["role"] if found else None
        if role not in _FOLLOWS[before]:
            raise ValueError(f"{' or '.join(_FOLLOWS[before])} {place}, not {role}")
        found.append({"role": role, "content": content})
    if found[-1]["role"] != "assistant":
        raise ValueError("an answer of the assistant as the last message")
    return found


_FOLLOWS: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
}
"""The roles that may follow a role."""


def question_of(document: str) -> str:
    """Return what stands before the first answer; pairs with the same question share a split."""
    record = json.loads(document)
    if MESSAGES not in record:
        return str(record[PROMPT])
    roles = [message["role"] for message in record[MESSAGES]]
    return json.dumps(record[MESSAGES][: roles.index("assistant")])


def text_of(document: str) -> str:
    """Return a pair as plain text, for what reads a corpus without its labels."""
    record = json.loads(document)
    if MESSAGES not in record:
        return str(record[PROMPT] + record[COMPLETION])
    return "".join(segment.text for segment in ChatTemplate().segments(record[MESSAGES]))


class PairEncoder:
    """Pairs to tokens.

    The tokens of a prompt are those of the prompt alone, as generation gives them to the model. The
    tokens of an answer are what the tokenizer appends to them for the whole text. Where it would
    merge tokens across the border, the answer is encoded alone.

    Attributes:
        template: Renders chats. Texts of ``prompt`` and ``completion`` are taken as they are.

    Raises:
        ConfigError: The chat template is unreadable.
    """

    def __init__(self, tokenizer: BaseTokenizer) -> None:
        self._tokenizer = tokenizer
        self.template = ChatTemplate.of(tokenizer)

    def encode(self, document: str) -> Tokens:
        """Encode a pair.

        Args:
            document: Result of :func:`parse_pair`.

        Returns:
            Its tokens ``(n,)``, int32; those that are no labels as complements. A text begins
            with BOS (a chat if its template does), an answer without a template ends with EOS.
        """
        return self._encode(*self._segments(json.loads(document)))

    def prompt(self, document: str) -> tuple[list[int], str]:
        """Return the tokens before a pair's last answer, and the text of that answer."""
        record = json.loads(document)
        segments, bos = self._segments(record)
        answer = record[MESSAGES][-1]["content"] if MESSAGES in record else record[COMPLETION]
        tokens = self._encode(segments[:-1], bos)
        return [token if token >= 0 else ~token for token in tokens.tolist()], answer

    def _segments(self, record: dict[str, Any]) -> tuple[list[Segment], bool]:
        """Return the parts of a record, and whether BOS goes before them."""
        if MESSAGES not in record:
            return [Segment(record[PROMPT], False), Segment(record[COMPLETION], True, True)], True
        parts = self.template.segments(record[MESSAGES])
        if not self.template.digest:
            return parts, True
        bos, first = self.template.bos, parts[0].text
        if bos and first.startswith(bos):
            return [Segment(first[len(bos) :], answer=False), *parts[1:]], True
        return parts, False

    def _encode(self, segments: Sequence[Segment], bos: bool) -> Tokens:
        found: list[int] = []
        text, known = "", self._ids("", bos)  # since the beginning or the last EOS
        found += [~token for token in known]
        for segment in segments:
            text += segment.text
            whole = self._ids(text, bos)
            border = len(known)
            if whole[:border] == known:
                new, known = whole[border:], whole
            else:
                new = self._ids(segment.text, False)
                known = known + new
            if segment.ends and self._tokenizer.eos_id is not None:
                new = [*new, self._tokenizer.eos_id]
                text, known, bos = "", [], False
            found += new if segment.answer else [~token for token in new]
        return np.array(found, dtype=np.int32)

    def _ids(self, text: str, bos: bool) -> list[int]:
        """Encode a text, with BOS or without; a tokenizer that adds its own is corrected."""
        ids = self._tokenizer.encode(text, add_bos=bos, add_eos=False)
        if getattr(self._tokenizer, "hf_adds_eos", False):
            ids = ids[:-1]
        if not bos and getattr(self._tokenizer, "hf_adds_bos", False):
            ids = ids[1:]
        return ids
