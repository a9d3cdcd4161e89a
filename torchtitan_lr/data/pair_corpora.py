# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Corpora of pairs: the user's .jsonl files, and the documented functions of the interpreter.

Their documents are canonical records (:func:`torchtitan_lr.data.pairs.parse_pair`). Iterating over
such a corpus yields the same pairs as plain text, for tools that have no use for labels.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lr.data.blocks import BlockCorpus, Split
from torchtitan_lr.data.corpora import PythonStdlib
from torchtitan_lr.data.held_out import document_hash
from torchtitan_lr.data.local_corpus import HEAD_BYTES, LocalCorpus, find_files
from torchtitan_lr.data.pairs import (
    COMPLETION,
    PROMPT,
    is_pair,
    parse_pair,
    question_of,
    text_of,
)
from torchtitan_lr.errors import ConfigError, DataError

STDLIB_DOCS = "python_stdlib_docs"

CUE = "\n\n# Summary:"
"""What separates a function's source from the line to write about it."""


class PairCorpus(BlockCorpus):
    """A corpus whose documents are canonical records of pairs."""

    pairs = True

    def records(self) -> Iterator[str]:
        """Yield every record once, in order.

        Raises:
            DataError: More records are invalid than may be skipped.
        """
        yield from BlockCorpus.__iter__(self)

    def __iter__(self) -> Iterator[str]:
        """Yield every pair once as plain text."""
        return map(text_of, self.records())


class LocalPairs(PairCorpus, LocalCorpus):
    """The pairs and chats of .jsonl files; one pair in 200 is held out, by its question.

    Args:
        path: See :class:`LocalCorpus`.
        key: See :class:`LocalCorpus`.
        rows: See :class:`LocalCorpus`.
        split: See :class:`LocalCorpus`.
        max_bad_records: See :class:`LocalCorpus`.

    Raises:
        ConfigError: As for :class:`LocalCorpus`, or a file is not .jsonl.
        DataError: As for :class:`LocalCorpus`.
    """

    def __init__(
        self,
        path: str,
        key: str,
        rows: int | None = None,
        split: Split = "all",
        max_bad_records: int = 0,
    ) -> None:
        for file in find_files(path, key):
            if file.suffix != ".jsonl":
                raise ConfigError(key, str(file), "only .jsonl files in a corpus of pairs")
        LocalCorpus.__init__(self, path, key, rows, split, max_bad_records)

    def fingerprint(self) -> str:
        """Return the fingerprint of :class:`LocalCorpus`, with the kind of its records."""
        return super().fingerprint() + " pairs"

    def parse_line(self, line: bytes) -> str:
        """Return the canonical record of a line; errors as for :func:`parse_pair`."""
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        return parse_pair(record)

    def hash_of(self, document: str) -> int:
        """Return the hash of what stands before the first answer."""
        return document_hash(question_of(document))


def holds_pairs(path: str, key: str) -> bool:
    """Return whether the first JSON object of the first .jsonl file is a pair or a chat.

    Args:
        path: ``dataset_path``: file, folder or glob pattern.
        key: The TOML key to name in errors.

    Raises:
        ConfigError: There are no such files.
    """
    file = next((file for file in find_files(path, key) if file.suffix == ".jsonl"), None)
    if file is None:
        return False
    try:
        with file.open("rb") as lines:
            while lines.tell() < HEAD_BYTES and (line := lines.readline()):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    return is_pair(record)
    except OSError:  # the corpus itself reports it
        pass
    return False


class PythonStdlibDocs(PairCorpus, PythonStdlib):
    """Functions of the standard library and the first line of their docstrings.

    The prompt is the function's source without its docstring and decorators, the completion the
    docstring's first line. Functions that have no other statement are left out. The files, and
    those that are held out, are those of :class:`PythonStdlib`: a model trained on
    ``python_stdlib`` has not seen the held-out pairs.

    Args:
        split: The split to read.
        key: The TOML key to name in errors.
        root: The library's folder; the running interpreter's by default.

    Raises:
        ConfigError: The interpreter has no library sources.
    """

    def __init__(self, split: Split, key: str, root: Path | None = None) -> None:
        PythonStdlib.__init__(self, split, key, root)
        self.name = STDLIB_DOCS

    def documents(self, block: int) -> Iterator[str | DataError]:
        """Yield the pairs of one file, in the order of the functions' first lines."""
        for text in super().documents(block):
            if isinstance(text, DataError):
                yield text
            else:
                yield from documented_functions(text)


def documented_functions(source: str) -> Iterator[str]:
    """Yield the pairs of a module.

    Args:
        source: The module's text; one that this interpreter cannot parse has no pairs.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = re.split(r"\r\n|\r|\n", source)  # as Python counts them
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    for node in sorted(functions, key=lambda node: node.lineno):
        summary = (ast.get_docstring(node) or "").strip().partition("\n")[0].strip()
        if not summary or len(node.body) < 2:
            continue
        docstring, following = node.body[:2]
        first, last = docstring.lineno, docstring.end_lineno or docstring.lineno
        if lines[first - 1][: docstring.col_offset].strip() or following.lineno <= last:
            continue  # shares a line with other code
        code = lines[node.lineno - 1 : first - 1] + lines[last : node.end_lineno]
        prompt = textwrap.dedent("\n".join(code)) + CUE
        yield parse_pair({PROMPT: prompt, COMPLETION: f" {summary}"})
