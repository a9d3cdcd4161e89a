# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Pairs and chats for fine-tuning, with loss on the answers alone.

A record is ``{"prompt": ..., "completion": ...}`` or ``{"messages": [...]}``. It is checked and
made canonical JSON where it is read, and encoded where it is prepared. A token that is no label is
encoded as its complement ``~t``, which is negative; on disk the two are tokens and a loss mask.

transformers renders a chat by the template of the tokenizer's folder, in its sandbox. A template is
not given the date, because the tokens of a corpus would then depend on the day, and has limits of
time and length. The name of a special token in a message is text, as with
``sanitize_control_tokens`` of transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from torchtitan_lr.config.files import file_within, read_regular
from torchtitan_lr.data.tokenizer import TOKENIZER_CONFIG, Tokenizer, Tokens, encode_texts
from torchtitan_lr.errors import ConfigError

PROMPT, COMPLETION, MESSAGES = "prompt", "completion", "messages"

# Around the name of a special token in a message: no characters of any text.
_MARKS = "\ufdd0", "\ufdd1"

CHAT_TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # folder of templates with names

_MOST_BYTES = 1 << 26  # of a template's file
_KEY, _WANT = "model.hf_assets_path", "a chat template in Jinja, or none at all"
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# In front of a template: it then finds no function of the date. The sandbox drops the line.
_UNDATED = "{% set strftime_now = no_such_function %}\n"

MOST_SECONDS = 10.0  # to render one chat: a template can have a loop without end
MOST_CHARACTERS = 1 << 26  # of one rendered chat

Message = dict[str, Any]
Rendered = tuple[str, list[tuple[int, int]]]
"""A chat as text, and where its answers begin and end, in characters and in order."""


def parse_pair(record: Any) -> str:
    """Check a record, and return it as canonical JSON.

    Other keys of messages are for the template. A ValueError says what was expected.
    """
    found = record if isinstance(record, dict) else {}
    if MESSAGES in found:
        if found.get("tools"):
            raise ValueError('a chat without "tools"')
        found = {MESSAGES: _parse_messages(found[MESSAGES])}
    else:
        found = {name: found.get(name) for name in (PROMPT, COMPLETION)}
        if not all(isinstance(text, str) for text in found.values()):
            want = f'a JSON object with strings "{PROMPT}" and "{COMPLETION}", or with "{MESSAGES}"'
            raise ValueError(want)
        if not found[COMPLETION].strip():
            raise ValueError(f'a "{COMPLETION}" that is not empty')
    return json.dumps(found, ensure_ascii=False, sort_keys=True)


def _parse_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'a list of messages in "{MESSAGES}"')
    found, roles = [], ["system", "user"]
    for place, message in enumerate(messages, 1):
        parts = message if isinstance(message, dict) else {}
        role, content = parts.get("role"), parts.get("content")
        if role not in roles:
            raise ValueError(f"the role {' or '.join(roles)} in message {place}, not {role!r}")
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f'a string that is not empty as "content" of message {place}')
        found.append({name: value for name, value in parts.items() if value is not None})
        roles = ["assistant"] if role == "user" else ["user"]
    if role != "assistant":
        raise ValueError("an answer of the assistant as the last message")
    return found


def question_of(document: str) -> str:
    """Return what stands before the first answer; pairs with the same question share a split."""
    record = json.loads(document)
    if MESSAGES not in record:
        return str(record[PROMPT])
    messages = [{name: m[name] for name in ("content", "role")} for m in record[MESSAGES]]
    roles = [message["role"] for message in messages]
    return json.dumps(messages[: roles.index("assistant")])


def text_of(document: str) -> str:
    """Return a pair as plain text, for what reads a corpus without its labels."""
    return "".join(text for text, _ in _plain(json.loads(document)))


def _plain(record: dict[str, Any]) -> list[tuple[str, bool]]:
    """Return the parts of a pair's text, or of a chat's plain form; and whether each is an answer.

    In the plain form a message is a heading and its text.
    """
    if MESSAGES not in record:
        return [(record[PROMPT], False), (record[COMPLETION], True)]
    parts, context = list[tuple[str, bool]](), ""
    for index, message in enumerate(record[MESSAGES]):
        context += "\n\n" * (index > 0) + f"### {message['role'].capitalize()}:\n"
        if message["role"] == "assistant":
            parts += [(context, False), (message["content"], True)]
            context = ""
        else:
            context += message["content"]
    return parts


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
            text, answers = self._render(messages, opened=not answered)
            if not answered:
                return text, []
            if not self._marked:  # transformers finds no answer
                answers = list(self._by_prefixes(messages, text))
            if any(begin == end for begin, end in answers) or not answers:
                raise ValueError("it needs some text for every answer")
            return text, answers
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
            raise ValueError(f"it makes more than {MOST_CHARACTERS} characters")
        return texts[0], answers[0] if answers else []

    def _by_prefixes(self, messages: list[Message], whole: str) -> Iterator[tuple[int, int]]:
        """Yield the places of answers, from the texts of the chat's beginnings."""
        end = 0
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self._render(messages[:place], opened=True)
            after, _ = self._render(messages[: place + 1])
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
    """Raise after `MOST_SECONDS` of work.

    Only the main thread has this limit: other threads receive no signal. The timer counts the
    process's own time, so `signal.alarm` stays free for others.
    """

    def stop(*_: Any) -> NoReturn:
        raise TimeoutError(f"it takes more than {MOST_SECONDS:g} seconds")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class PairEncoder:
    """Pairs to tokens; chats by the template of the tokenizer's folder.

    The tokens of a pair's prompt are those of the prompt alone, as generation gives them to the
    model. The tokens of an answer are what the tokenizer appends to them for the whole text. Where
    it would merge tokens across the border, the answer is encoded alone. ``digest`` is the identity
    of the template, empty for the plain form.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._template = tokenizer, ChatTemplate(tokenizer)
        self.digest = self._template.digest
        added = tokenizer.tokenizer.get_added_tokens_decoder().values()
        names = sorted((token.content for token in added if token.special), key=len, reverse=True)
        some = "|".join(map(re.escape, names)) or "(?!)"
        self._names = re.compile(some)
        # A template that cuts a text can leave one mark alone.
        self._marks = re.compile(f"{_MARKS[0]}({some}){_MARKS[1]}|[{''.join(_MARKS)}]")

    def encode(self, document: str, answered: bool = True) -> Tokens:
        """Encode a result of `parse_pair`, or what stands before its last answer.

        Returns its tokens ``(n,)``, int32; those that are no labels as complements. A text begins
        with BOS (a chat if its template does), an answer without a template ends with EOS.
        """
        record = json.loads(document)
        if MESSAGES in record and self.digest:
            return self._encode_chat(record, answered)
        parts, bos = _plain(record), True
        text, known = "", self._tokenizer.begin + self._ids("")  # since the last EOS
        found = [~token for token in known]
        for piece, answer in parts if answered else parts[:-1]:
            text += piece
            whole, border = self._tokenizer.begin * bos + self._ids(text), len(known)
            new = whole[border:] if whole[:border] == known else self._ids(piece)
            known = known + new
            if answer and self._tokenizer.eos_id is not None:
                new = [*new, *self._tokenizer.end]
                text, known, bos = "", [], False
            found += new if answer else [~token for token in new]
        return np.array(found, dtype=np.int32)

    def _ids(self, text: str) -> list[int]:
        return encode_texts(self._tokenizer, [text])[0]  # threads encode at the same time

    def end_mark(self) -> str:
        """Return what the template writes behind an answer, such as ``<|im_end|>``."""
        probe = "ANSWER"
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": probe}]
        text = self._template.places(chat)[0] if self.digest else ""
        return text.rpartition(probe)[2].strip()

    def _encode_chat(self, record: dict[str, Any], answered: bool) -> Tokens:
        """Encode a whole chat by the template: a token is a label if a part of it is an answer."""
        messages = self._marked(record[MESSAGES])
        text, places = self._template.places(messages if answered else messages[:-1], answered)
        found, answers = list[int](), iter([*places, (len(text) + 1,) * 2])
        begin, end = next(answers)
        for token, first, last in self._tokens(text):
            while first >= end:
                begin, end = next(answers)
            found.append(token if last > begin else ~token)
        return np.array(found, dtype=np.int32)

    def _tokens(self, text: str) -> list[tuple[int, int, int]]:
        """Encode a rendered chat: ids, with where they begin and end in the text."""
        found, place = list[tuple[int, int, int]](), 0
        for match in [*self._marks.finditer(text), None]:
            end = len(text) if match is None else match.start()
            found += self._piece(text, place, end, special=True)
            if match is not None:
                found += self._piece(text, *match.span(1), special=False)
                place = match.end()
        return found

    def _piece(
        self, text: str, start: int, end: int, special: bool
    ) -> Iterator[tuple[int, int, int]]:
        """Encode a part of a text; ids, with where they begin and end in the text."""
        if start == end:
            return
        # Behind a line break: some tokenizers begin every text with a space.
        before = self._tokenizer.encode("\n") if start else []
        encoding = self._tokenizer.encode_text("\n" * bool(start) + text[start:end], special)
        ahead, shift = len(before), start - bool(start)
        if encoding.ids[:ahead] != before:
            encoding = self._tokenizer.encode_text(text[start:end], special)
            ahead, shift = 0, start
        for token, (first, last) in list(zip(encoding.ids, encoding.offsets, strict=True))[ahead:]:
            yield token, shift + first, shift + last

    def _marked(self, value: Any) -> Any:
        """Mark the names of special tokens in the texts of a chat."""
        if isinstance(value, str):
            for mark in _MARKS:
                value = value.replace(mark, "")
            return self._names.sub("\\g<0>".join(_MARKS), value)
        if isinstance(value, dict):
            return {name: self._marked(each) for name, each in value.items()}
        return [self._marked(each) for each in value] if isinstance(value, list) else value
