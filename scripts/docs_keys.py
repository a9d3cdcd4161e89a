# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write docs/keys.md: every TOML key with its default, and what this package's own ones mean.

    python -m scripts.docs_keys

A key's meaning is the docstring below its field in `torchtitan_lr.config`.
"""

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from torchtitan_lr.config.build import config_class
from torchtitan_lr.config.schema import JobConfig

PAGE = Path(__file__).resolve().parents[1] / "docs" / "keys.md"

INTRODUCTION = """# Keys

Every key of a run's TOML, with its default. The same key on the command line is
`--section.key=value`. `torchtitan-lr config show NAME` prints the values of a configuration and
where each comes from. `include = "base.toml"` at the top of a file, relative to it, starts from
another file's keys. In a path, `~` and `${NAME}` of the environment are replaced.
`python -m scripts.docs_keys` writes this page from the fields and their docstrings.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(render_page())


def render_page() -> str:
    """Return the page's Markdown."""
    ours = {field.name: _class_of(field) for field in fields(JobConfig)}
    parts = [INTRODUCTION]
    for section in fields(config_class()):
        kind = _class_of(section)
        if kind is not None:
            parts.append(_render_section(section.name, kind, ours.get(section.name)))
    return "\n".join(parts)


def _render_section(name: str, merged: type, ours: type | None) -> str:
    """Return a section: this package's keys with their meaning, then torchtitan's in one list."""
    meanings = {} if ours is None else _docstrings(ours)
    own, others = [], []
    for field in fields(merged):
        inner = _class_of(field)
        if inner is not None:
            others += [f"`{field.name}.{key.name}` = `{_default(key)}`" for key in fields(inner)]
        elif field.name in meanings:
            text = textwrap.indent(meanings[field.name], "  ").lstrip()
            own.append(f"- **`{field.name}`** = `{_default(field)}`: {text}")
        else:
            others.append(f"`{field.name}` = `{_default(field)}`")
    lines = [f"## `[{name}]`", "", *own]
    if others:
        lines += [*([""] if own else []), "torchtitan's: " + ", ".join(others) + "."]
    return "\n".join(lines) + "\n"


def _class_of(field: Field[Any]) -> type | None:
    return field.type if isinstance(field.type, type) and is_dataclass(field.type) else None


def _default(field: Field[Any]) -> str:
    value = field.default
    if field.default_factory is not MISSING:
        value = field.default_factory()
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _docstrings(kind: type) -> dict[str, str]:
    """Return the docstrings below a class's fields, by field."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


if __name__ == "__main__":
    main()
