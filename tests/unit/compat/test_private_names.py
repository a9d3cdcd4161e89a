# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""No private module of torch or torchtitan, no patch of either, outside ``compat/``, ``titan/``."""

import ast
import sys

from tests.commands import ROOT

PACKAGE = ROOT / "torchtitan_lr"
ROOMS = ("compat", "titan")
FILES = [p for p in PACKAGE.rglob("*.py") if p.parent.relative_to(PACKAGE).name not in ROOMS]


def reached(text):
    """Lines of a program that import a private name, or change what they have imported."""
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            if names[0].split(".")[0] not in sys.stdlib_module_names:
                imported |= {(a.asname or a.name).split(".")[0] for a in node.names}
            parts = [part for name in names for part in name.split(".")]
            if "unittest" in parts or any(p[0] == "_" and p[:2] != "__" for p in parts):
                yield ast.unparse(node)
    for node in ast.walk(ast.parse(text)):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and ast.unparse(node).split(".")[0] in imported:
            yield ast.unparse(node)


def test_upstreams_private_names_stand_in_two_rooms():
    found = {str(path.relative_to(PACKAGE)): [*reached(path.read_text())] for path in FILES}
    assert len(found) > 100
    assert {name: lines for name, lines in found.items() if lines} == {}
