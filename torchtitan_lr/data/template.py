# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The chat template of a tokenizer's folder: chats to text, and the places of answers in it.

transformers renders it in its sandbox, as ``apply_chat_template`` does, with the folder's special
tokens. Two things differ. A template is not given the date, because the tokens of a corpus would
then depend on the day; and a stranger's template has limits of time and length.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torchtitan_lr.config.files import file_within, read_regular
from torchtitan_lr.data.tokenizer import TOKENIZER_CONFIG, Tokenizer
from torchtitan_lr.errors import ConfigError

CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # folder of templates with names

_MOST_BYTES = 1 << 26  # of a template's file
_KEY, _WANT = "model.hf_assets_path", "a chat template in Jinja, or none at all"
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_UNDATED = "{% set strftime_now = no_such_function %}\n"
"""In front of a template: it then finds no function of the date. The sandbox drops the line."""

MOST_SECONDS = 10.0  # to render one chat: a template can have a loop without end
MOST_CHARACTERS = 1 << 26  # of one rendered chat
_TOO_LONG = f"it makes more than {MOST_CHARACTERS} characters"

Message = dict[str, Any]
Span = tuple[int, int]
"""Begin and end of a part of a text, in characters."""


class Rendered(NamedTuple):
    """A chat as text, and the places of its answers, in order."""

    text: str
    answers: list[Span]


def template_files(folder: Path) -> dict[str, str]:
    """Return the names of the files of a folder's chat templates, by the templates' names."""
    found = {"default": CHAT_TEMPLATE} if (folder / CHAT_TEMPLATE).is_file() else {}
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    return found | {file.stem: f"{MORE_TEMPLATES}/{file.name}" for file in more}


class ChatTemplate:
    """The chat template of a tokenizer; ``digest`` is its identity, empty where there is none.

    A ConfigError says that it is unreadable or has no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        folder = Path(tokenizer.tokenizer_path)
        self._special, self._where = tokenizer.special_tokens, str(folder / CHAT_TEMPLATE)
        try:
            files = template_files(folder)
            if files:  # they replace all templates of the configuration
                text = read_regular(file_within(folder, files["default"]), _MOST_BYTES).decode()
                # Ends of lines as where a text file is read.
                self._source = text.replace("\r\n", "\n").replace("\r", "\n")
            else:
                self._where = str(folder / TOKENIZER_CONFIG)
                self._source = _of_config(tokenizer.config.get("chat_template"))
            if (files or self._source) and not self._source.strip():
                raise ValueError("it has no text")
        except Exception as error:  # unreadable, or of another type
            raise ConfigError(_KEY, self._where, f"{_WANT} ({error!r})") from error
        self._marked = _MARKED.search(self._source) is not None
        source = self._source.encode()
        self.digest = hashlib.sha256(source).hexdigest()[:8] if source else ""

    def places(self, messages: list[Message], answered: bool = True) -> Rendered:
        """Render a chat and find its answers, each with its end mark; or what stands before one.

        The answers are those that the template marks with ``{% generation %}``. Without marks an
        answer is what it adds to the text in front of the answer. A ConfigError says that the
        template cannot render the chat, or needs marks.
        """
        try:
            whole = self._render(messages, opened=not answered)
            if not answered:
                return whole
            if not self._marked:  # transformers finds no answer
                whole = Rendered(whole.text, list(self._by_prefixes(messages, whole.text)))
            if any(begin == end for begin, end in whole.answers) or not whole.answers:
                raise ValueError("it needs some text for every answer")
            return whole
        except Exception as error:  # a template can raise anything
            start = json.dumps(messages, ensure_ascii=False)[:80]
            want = f"a template that renders every chat ({error}); the chat begins with {start}"
            if type(error).__name__ == "TemplateSyntaxError":
                want = f"{_WANT} ({error})"
            raise ConfigError(_KEY, self._where, want) from error

    def _render(self, messages: list[Message], opened: bool = False) -> Rendered:
        """Render a chat, with ``opened`` up to an answer that is to follow."""
        # Imported late: few runs have a template.
        from transformers.utils.chat_template_utils import render_jinja_template

        options: dict[str, Any] = {"return_assistant_tokens_mask": self._marked, **self._special}
        source = _UNDATED + self._source
        with _limited():
            texts, answers = render_jinja_template(
                [messages], None, None, source, add_generation_prompt=opened, **options
            )
        if len(texts[0]) > MOST_CHARACTERS:
            raise ValueError(_TOO_LONG)
        return Rendered(texts[0], answers[0] if answers and not opened else [])

    def _by_prefixes(self, messages: list[Message], whole: str) -> Iterator[Span]:
        """Yield the places of answers, from the texts of the chat's beginnings."""
        end = 0
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:place], opened=True).text
            after = self._render(messages[: place + 1]).text
            if not (whole.startswith(after) and after.startswith(before) and len(before) >= end):
                want = "it needs text that only grows from one message to the next"
                raise ValueError(f"{want}, or {{% generation %}} around its answers")
            end = len(after)
            yield len(before), end


def _of_config(given: Any) -> str:
    """Return the template of a configuration: a text, or the default one of several with names."""
    if isinstance(given, list):
        given = {each["name"]: each["template"] for each in given}
    return str((given["default"] if isinstance(given, dict) else given) or "")


@contextmanager
def _limited() -> Iterator[None]:
    """Raise after `MOST_SECONDS` of work, or for memory that `MOST_CHARACTERS` do not need.

    Only the main thread has a limit of time: other threads receive no signal. The timer counts the
    process's own time, so `signal.alarm` stays free for others.
    """

    def stop(*_: Any) -> NoReturn:
        raise TimeoutError(f"it takes more than {MOST_SECONDS:g} seconds")

    limits = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    timed = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGVTALRM, stop) if timed else None
    try:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        if limits[0] == resource.RLIM_INFINITY:
            # 4 bytes per character, of the text and of its pieces, twice.
            most = used + 16 * MOST_CHARACTERS
            resource.setrlimit(resource.RLIMIT_DATA, (most, limits[1]))
        yield
    except MemoryError as error:
        raise ValueError(_TOO_LONG) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
