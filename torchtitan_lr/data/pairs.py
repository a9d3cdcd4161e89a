# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pairs and chats for fine-tuning, with loss on the answers alone.

A record is ``{"prompt": ..., "completion": ...}`` or ``{"messages": [...]}``. It is checked and
made canonical JSON where it is read, and encoded where it is prepared. A token that is no label is
encoded as its complement ``~t``, which is negative; on disk the two are tokens and a loss mask.

A chat becomes text by the template of the tokenizer's folder: ``chat_template.jinja``, or
``chat_template`` of ``tokenizer_config.json``, rendered as transformers does: in a sandbox, with
the folder's special tokens. Without one every message is a heading and its text, and each answer
ends with EOS.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from torchtitan_lr.errors import ConfigError

if TYPE_CHECKING:
    from torchtitan_lr.titan.base import HuggingFaceTokenizer

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]
"""The ids of one document, BOS and EOS included: ``(n,)``, of any integer type."""

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"


def parse_pair(record: Any) -> str:
    """Check a record, and return it as canonical JSON.

    Raises:
        ValueError: It is not a pair or a chat; the message is what was expected.
    """
    found = record if isinstance(record, dict) else {}
    if MESSAGES in found:
        found = {MESSAGES: _parse_messages(found[MESSAGES])}
    else:
        found = {name: found.get(name) for name in (PROMPT, COMPLETION)}
        if not all(isinstance(text, str) for text in found.values()):
            want = f'a JSON object with strings "{PROMPT}" and "{COMPLETION}", or with "{MESSAGES}"'
            raise ValueError(want)
        if not found[COMPLETION].strip():
            raise ValueError(f'a "{COMPLETION}" that is not empty')
    return json.dumps(found, ensure_ascii=False, sort_keys=True)


def _parse_messages(messages: Any) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'a list of messages in "{MESSAGES}"')
    found, roles = [], ["system", "user"]
    for place, message in enumerate(messages, 1):
        parts = message if isinstance(message, dict) else {}
        role, content = parts.get("role"), parts.get("content")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f'a "content" that is not empty in message {place}')
        if role not in roles:
            raise ValueError(f"the role {' or '.join(roles)} in message {place}, not {role!r}")
        found.append({"role": role, "content": content})
        roles = ["assistant"] if role == "user" else ["user"]
    if role != "assistant":
        raise ValueError("an answer of the assistant as the last message")
    return found


def question_of(document: str) -> str:
    """Return what stands before the first answer; pairs with the same question share a split."""
    record = json.loads(document)
    if MESSAGES not in record:
        return str(record[PROMPT])
    roles = [message["role"] for message in record[MESSAGES]]
    return json.dumps(record[MESSAGES][: roles.index("assistant")])


def text_of(document: str) -> str:
    """Return a pair as plain text, for what reads a corpus without its labels."""
    return "".join(text for text, _ in _plain(json.loads(document)))


_KEY, _TEMPLATE = "model.hf_assets_path", "a chat template in Jinja, or none at all"

Segment: TypeAlias = tuple[str, bool]
"""A part of a record's text, and whether its tokens are labels."""


def _plain(record: dict[str, Any]) -> list[Segment]:
    """Return a pair's two parts, or the plain form of a chat: heading and text of each message."""
    if MESSAGES not in record:
        return [(record[PROMPT], False), (record[COMPLETION], True)]
    parts, context = list[Segment](), ""
    for index, message in enumerate(record[MESSAGES]):
        context += "\n\n" * (index > 0) + f"### {message['role'].capitalize()}:\n"
        if message["role"] == "assistant":
            parts += [(context, False), (message["content"], True)]
            context = ""
        else:
            context += message["content"]
    return parts


class PairEncoder:
    """Pairs to tokens; chats by the template of the tokenizer's folder.

    The tokens of a prompt are those of the prompt alone, as generation gives them to the model. The
    tokens of an answer are what the tokenizer appends to them for the whole text. Where it would
    merge tokens across the border, the answer is encoded alone.

    Attributes:
        digest: Identity of the chat template; empty for the plain form.

    Raises:
        ConfigError: The template is unreadable or has no text; at the first chat, is not valid.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer, self.digest, self._bos = tokenizer, "", ""
        path, config = Path(tokenizer.tokenizer_path, "chat_template.jinja"), tokenizer.config or {}
        try:
            if path.is_file():
                source = path.read_text(encoding="utf-8")
            elif config.get("chat_template") is not None:
                path, source = path.with_name("tokenizer_config.json"), config["chat_template"]
                if isinstance(source, list):  # several by name
                    source = {each["name"]: each["template"] for each in source}["default"]
            else:
                return
            if not source.strip():
                raise ValueError("it has no text")
        except Exception as error:  # unreadable, or of another type
            raise ConfigError(_KEY, str(path), f"{_TEMPLATE} ({error})") from error
        self._where, self._source = (_KEY, str(path)), source
        self.digest = hashlib.sha256(source.encode()).hexdigest()[:8]
        self._special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token") and token
        }
        self._bos = self._special.get("bos_token", "")

    @cached_property  # prompts with completions need none
    def _template(self) -> Any:
        # Imported late: few runs have a template. torch itself requires jinja2. transformers would
        # also give a template the date: the tokens of a corpus would depend on the day.
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        blocks = {"trim_blocks": True, "lstrip_blocks": True}
        environment = ImmutableSandboxedEnvironment(extensions=[loopcontrols], **blocks)
        # As transformers does: jinja2's own filter escapes HTML.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = refuse
        # The block that marks answers for transformers is only its content, with its own names.
        source = re.sub(r"(\{%[-+]?\s*)(end)?generation\b", r"\1\2with", self._source)
        try:
            return environment.from_string(source)
        except Exception as error:  # a feature that is not there
            raise ConfigError(*self._where, f"{_TEMPLATE} ({error})") from error

    def segments(self, messages: Sequence[dict[str, str]]) -> list[Segment]:
        """Render a chat, messages of ``role`` and ``content``, of which the last is an answer.

        Returns:
            The parts in order; an answer has the end mark that the template writes behind it.

        Raises:
            ConfigError: The template cannot render it, or a part changes with the messages after.
        """
        if not self.digest:
            return _plain({MESSAGES: messages})
        parts, text = list[Segment](), ""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        template = self._template
        try:
            for count, opened in ((i + after, not after) for i in answers for after in (0, 1)):
                given = {"messages": list(messages[:count]), "add_generation_prompt": opened}
                longer = str(template.render(given, **self._special))
                if not longer.startswith(text):
                    raise ValueError("it needs text that only grows from one message to the next")
                if longer == text and not opened:
                    raise ValueError("it needs some text for every answer")
                parts.append((longer[len(text) :], not opened))
                text = longer
        except Exception as error:  # a template can raise anything
            start = json.dumps(list(messages), ensure_ascii=False)[:80]
            want = f"a template that renders every chat ({error}); the chat begins with {start}"
            raise ConfigError(*self._where, want) from error
        return parts

    def encode(self, document: str, answered: bool = True) -> Tokens:
        """Encode a pair.

        Args:
            document: Result of :func:`parse_pair`.
            answered: Whether to encode its last answer, or only what stands before it.

        Returns:
            Its tokens ``(n,)``, int32; those that are no labels as complements. A text begins
            with BOS (a chat if its template does), an answer without a template ends with EOS.
        """
        record, bos = json.loads(document), True
        templated = MESSAGES in record and bool(self.digest)
        parts = self.segments(record[MESSAGES]) if templated else _plain(record)
        if templated:
            bos = bool(self._bos) and parts[0][0].startswith(self._bos)
            parts[0] = parts[0][0].removeprefix(self._bos), False
        text, known = "", self._ids("", bos)  # since the beginning or the last EOS
        found = [~token for token in known]
        for piece, answer in parts if answered else parts[:-1]:
            text += piece
            whole, border = self._ids(text, bos), len(known)
            new = whole[border:] if whole[:border] == known else self._ids(piece, False)
            known = known + new
            if answer and not templated and self._tokenizer.eos_id is not None:
                new = [*new, self._tokenizer.eos_id]
                text, known, bos = "", [], False
            found += new if answer else [~token for token in new]
        return np.array(found, dtype=np.int32)

    def _ids(self, text: str, bos: bool) -> list[int]:
        """Encode a text, with BOS or without; a tokenizer that adds its own is corrected."""
        ids = self._tokenizer.encode(text, add_bos=bos, add_eos=False)
        ids = ids[: len(ids) - self._tokenizer.hf_adds_eos]
        return ids if bos else ids[self._tokenizer.hf_adds_bos :]
