# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A task over the embedded corpus: which of four continuations follows a piece of code?

The pieces are lines of the standard library's held-out files. Three of the continuations come from
other files. Files and pieces are drawn with a fixed seed, so that every model gets the same
questions on one version of Python.

``data/assets/tasks`` has the task's file for EleutherAI's lm-evaluation-harness.
"""

import random
from collections.abc import Sequence
from typing import Any

from torchtitan_lr.data.corpora import PythonStdlib

QUESTIONS = 200
CHOICES = 4
CONTEXT_CHARACTERS = 180
"""A context has whole lines of at least as many."""

CONTINUATION_CHARACTERS = range(80, 120)
"""A continuation has whole lines of so many ASCII characters: in a window of 128 tokens
even single bytes would fit."""

_TRIES = 50
"""Draws from a file before it is left out."""


def build_questions(
    files: Sequence[str], number: int = QUESTIONS, seed: int = 0
) -> list[dict[str, Any]]:
    """Build questions with one right continuation each.

    Args:
        files: Texts, at least `CHOICES` of them with enough lines. They take turns.
        number: Number of questions, if any file has enough lines.
        seed: Seed of all draws.

    Returns:
        ``context``, ``choices`` and ``label``, the index of the right choice, by question.
    """
    source = random.Random(seed)
    pieces: list[tuple[int, str, str]] = []
    left = list(range(len(files)))
    while left and len(pieces) < number:
        for file in left[: number - len(pieces)]:
            piece = _piece(files[file], source)
            if piece is None:
                left.remove(file)
            else:
                pieces.append((file, *piece))
    questions = []
    for file, context, right in pieces:
        others = [text for other, _, text in pieces if other != file and text != right]
        choices = [*source.sample(sorted(set(others)), CHOICES - 1), right]
        source.shuffle(choices)
        questions.append({"context": context, "choices": choices, "label": choices.index(right)})
    return questions


def _piece(text: str, source: random.Random) -> tuple[str, str] | None:
    """Draw consecutive lines of a file: a context, and what follows it; None if it is too short."""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    for _ in range(_TRIES):
        start = source.randrange(max(1, len(lines)))
        middle = _end(lines, start, CONTEXT_CHARACTERS)
        end = _end(lines, middle, CONTINUATION_CHARACTERS.start)
        right = "".join(lines[middle:end])
        fits = end <= len(lines) and len(right) in CONTINUATION_CHARACTERS
        if fits and right.strip() and right.isascii():
            return "".join(lines[start:middle]), right
    return None


def _end(lines: Sequence[str], start: int, characters: int) -> int:
    """Return the line after as many characters; one beyond the last line if there are too few."""
    found = 0
    for index in range(start, len(lines)):
        found += len(lines[index])
        if found >= characters:
            return index + 1
    return len(lines) + 1


def load_questions(**options: Any) -> Any:
    """Return the questions as the harness reads a data set; its task file names this function.

    Args:
        **options: What the harness also passes; unused.

    Returns:
        A ``datasets.DatasetDict`` with the split ``test``.
    """
    import datasets  # imported late: only the harness needs it here

    del options
    questions = build_questions(list(PythonStdlib("validation", "--tasks")))
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(questions)})
