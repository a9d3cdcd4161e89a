# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Chats to text: by the template in the tokenizer's folder, else in a plain form.

The template is ``chat_template.jinja``, or ``chat_template`` of ``tokenizer_config.json``, rendered
as transformers does: in a sandbox, with the folder's special tokens. Without one, every message is
a heading and its text, and each answer ends with EOS.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torchtitan_lr.errors import ConfigError

if TYPE_CHECKING:
    from torchtitan_lr.titan.base import BaseTokenizer

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Tokens whose texts a template may use."""

_KEY = "model.hf_assets_path"


class Segment(NamedTuple):
    """A part of a chat's text, whether its tokens are labels, and whether EOS (a label) follows."""

    text: str
    answer: bool
    ends: bool = False


class ChatTemplate:
    """Renders the messages of a chat.

    Args:
        source: The template in Jinja; empty for the plain form.
        origin: Where the template is, for errors.
        special: Names and texts of special tokens, such as ``bos_token``.

    Attributes:
        digest: Identity of the template; empty for the plain form.
    """

    def __init__(
        self, source: str = "", origin: str = "", special: dict[str, str] | None = None
    ) -> None:
        self._source = source
        self._origin = origin
        self._special = special or {}
        self.bos = self._special.get("bos_token", "")
        self.digest = hashlib.sha256(source.encode()).hexdigest()[:8] if source else ""

    @staticmethod
    def of(tokenizer: BaseTokenizer) -> ChatTemplate:
        """Find the template of a tokenizer's folder.

        Raises:
            ConfigError: The template is unreadable or has no text.
        """
        folder = getattr(tokenizer, "tokenizer_path", None)
        if folder is None:
            return ChatTemplate()
        config = getattr(tokenizer, "config", None) or {}
        path = Path(folder) / TEMPLATE_FILE
        source: Any = None
        if path.is_file():
            try:
                source = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(_KEY, str(path), f"a template in UTF-8 ({error})") from error
        elif "chat_template" in config:
            path, source = Path(folder) / CONFIG_FILE, config["chat_template"]
            if isinstance(source, list):  # several by name
                named = {entry.get("name"): entry.get("template") for entry in source}
                source = named.get("default")
        else:
            return ChatTemplate()
        if not isinstance(source, str) or not source.strip():
            raise ConfigError(_KEY, str(path), "a chat template, or none at all")
        special = {name: _text(config.get(name)) for name in SPECIAL_TOKENS}
        return ChatTemplate(source, str(path), {k: v for k, v in special.items() if v})

    def segments(self, messages: Sequence[dict[str, str]]) -> list[Segment]:
        """Render a chat whose last message is an answer.

        Args:
            messages: ``role`` and ``content`` of each message.

        Returns:
            The parts in order; the tokens of the assistant's answers are labels, with the end
            mark that the template writes behind them.

        Raises:
            ConfigError: The template cannot render the chat, or the text of a part changes with
                the messages after it.
        """
        if not self._source:
            return _plain(messages)
        parts, text = [], ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            for count, opened in ((index, True), (index + 1, False)):
                longer = self._render(messages[:count], opened)
                if not longer.startswith(text):
                    self._fail("text that only grows from one message to the next", messages)
                parts.append(Segment(longer[len(text) :], answer=not opened))
                text = longer
            if not parts[-1].text:
                self._fail("some text for every answer", messages)
        return parts

    def _render(self, messages: Sequence[dict[str, str]], opened: bool) -> str:
        try:
            return str(
                self._compiled.render(
                    messages=list(messages), add_generation_prompt=opened, **self._special
                )
            )
        except ConfigError:
            raise
        except Exception as error:  # a template can raise anything
            self._fail(f"a template that renders every chat ({error})", messages)

    @cached_property
    def _compiled(self) -> Any:
        # Imported late: few runs have a template. torch itself requires jinja2.
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """The block that marks answers for transformers; here it is only its content."""

            tags = {"generation"}  # noqa: RUF012  (jinja2 reads a plain set)

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body, lineno=line)

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        # As transformers does: jinja2's own filter escapes HTML.
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self._source)
        except Exception as error:  # a syntax error, or a feature that is not there
            raise ConfigError(_KEY, self._origin, f"a chat template in Jinja ({error})") from error

    def _fail(self, want: str, messages: Sequence[dict[str, str]]) -> NoReturn:
        start = json.dumps(list(messages), ensure_ascii=False)[:80]
        raise ConfigError(_KEY, self._origin, f"{want}; the chat begins with {start}")


def _plain(messages: Sequence[dict[str, str]]) -> list[Segment]:
    """Return the plain form: a heading and the text of each message; EOS ends each answer."""
    parts: list[Segment] = []
    context = ""
    for message in messages:
        context += "\n\n" if parts or context else ""
        context += f"### {message['role'].capitalize()}:\n"
        if message["role"] == "assistant":
            parts += [Segment(context, False), Segment(message["content"], True, ends=True)]
            context = ""
        else:
            context += message["content"]
    return parts


def _text(token: Any) -> str:
    """Return a special token's text, which may stand in a dictionary."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""
