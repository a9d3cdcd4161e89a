# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The pairs of `training.dataset = "python_stdlib_docs"`, from the files of `cpython`.

python -m scripts.research.library_pairs >docs.jsonl
zstd -19 docs.jsonl -o torchtitan_lr/data/assets/cpython/docs.jsonl.zst
"""

import ast
import json
import re
import textwrap
from collections.abc import Iterator

import pyarrow as pa

from torchtitan_lr.data.pairs import COMPLETION, PROMPT, parse_pair
from torchtitan_lr.data.sources import CPYTHON, SHIPPED

CUE = "\n\n# Summary:"  # between a function's source and the line to write about it

LONGEST = 800
"""Characters of a pair; of longer ones little more than the source would fit a short row."""


def documented_functions(source: str) -> Iterator[str]:
    """Yield the pairs of a module: a function's source, and the first line of its docstring.

    The prompt has neither docstring nor decorators. Functions without other statements are left
    out.
    """
    lines = re.split(r"\r\n|\r|\n", source)  # as Python counts them
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
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


def library_pairs() -> Iterator[str]:
    """Yield the file's lines: a module's path, and its pairs as the lines of one text."""
    with pa.input_stream(str(SHIPPED[CPYTHON])) as file:
        modules = [json.loads(line) for line in file.read().splitlines()]
    for module in modules:
        pairs = [pair for pair in documented_functions(module["text"]) if len(pair) <= LONGEST]
        if pairs:
            yield json.dumps({"path": module["path"], "text": "\n".join(pairs)})


if __name__ == "__main__":
    print("\n".join(library_pairs()))
