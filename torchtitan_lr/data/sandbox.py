# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Jinja as transformers sets it up for chat templates: a sandbox, with limits of time and length.

Import this module late: few runs have a template. torch itself requires jinja2.
"""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_SECONDS = 10.0
"""Time to render one chat: a template can have a loop without end."""
MOST_CHARACTERS = 1 << 26
"""Length of one rendered chat, and of a repeated text in a template."""


@cache
def environment() -> Environment:
    """Return the sandbox with what transformers adds to it."""
    found = _Sandbox(extensions=[_Answers, loopcontrols], trim_blocks=True, lstrip_blocks=True)
    found.filters["tojson"] = _tojson
    found.globals["raise_exception"] = _refuse
    return found


def render(template: Template, values: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Return a template's text, and begin and end of each part that it marks as an answer.

    Raises:
        TimeoutError: It takes more than `MOST_SECONDS` of work in the main thread.
        ValueError: It makes more than `MOST_CHARACTERS`.
        Exception: The template cannot be rendered: a template can raise anything.
    """
    pieces, length, answers = list[str](), 0, list[tuple[int, int]]()
    marked: Any = template.environment  # which `_Answers` extends
    with _limited_time(), marked.marking(lambda: length, answers):
        for piece in template.generate(values):
            pieces.append(piece)
            length += len(piece)
            _check_length(length)
    return "".join(pieces), answers


class _Answers(Extension):
    """The block that marks an answer: ``{% generation %}``."""

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.extend(marking=self._marking)
        self._open: list[tuple[Callable[[], int], list[tuple[int, int]]]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        for position, found in self._open:
            begin = position()
            found.append((begin, begin + len(text)))
        return text

    @contextmanager
    def _marking(self, position: Callable[[], int], found: list[tuple[int, int]]) -> Iterator[None]:
        """Add the answers of a rendering to ``found``; ``position`` is the length so far."""
        self._open = [(position, found)]
        try:
            yield
        finally:
            self._open = []


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses products and powers that take all memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if isinstance(one, int) and hasattr(other, "__len__"):
                _check_length(one * len(other))
        if operator == "**":
            _check_length(abs(right))
        return super().call_binop(context, operator, left, right)


def _check_length(length: int) -> None:
    if length > MOST_CHARACTERS:
        raise ValueError(f"it makes more than {MOST_CHARACTERS} characters")


@contextmanager
def _limited_time() -> Iterator[None]:
    """Raise a TimeoutError after `MOST_SECONDS` of work.

    Only the main thread is limited: other threads receive no signal. The timer counts the
    process's own time, so `signal.alarm` stays free for others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> NoReturn:
        raise TimeoutError(f"it takes more than {MOST_SECONDS:g} seconds")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers does; Jinja's own filter escapes HTML."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
