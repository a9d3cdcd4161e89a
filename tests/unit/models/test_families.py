# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Each family is one file, and no other file compares its name."""

import ast

import pytest

from tests.commands import ROOT
from torchtitan_lr.config.schema import MODELS
from torchtitan_lr.models.families.registry import FAMILIES, find_family

PACKAGE = ROOT / "torchtitan_lr"
# The pages; an independent second statement; programs of the test suite; and the code of exported
# models, which imports nothing of this package.
MAY_NAME = ("models/families/", "formulas/", "hf/")


def comparisons(text):
    """Lines of a program that compare with a family's or a model's name."""
    models = {family.model_name for family in FAMILIES.values()}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare | ast.Match):
            strings = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
            line = ast.unparse(node)
            if strings & models or (strings & FAMILIES.keys() and "family" in line):
                yield line


def test_only_a_familys_page_compares_its_name():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(MAY_NAME):
            found[name] = list(comparisons(path.read_text()))
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        'args.family == "lax"',
        'shape.family not in ("full", "svd")',
        'config.model.name == "llama_full"',
        'match args.family:\n    case "cola": pass',
    ],
)
def test_such_a_comparison_would_be_noticed(text):
    assert list(comparisons(text))
    assert not list(comparisons('mode == "full"'))


def test_models_are_found_by_name():
    assert [find_family(f"llama_{name}") for name in FAMILIES] == list(FAMILIES.values())
    assert [find_family(name) for name in ("llama3", "cola", "llama_lora", "")] == [None] * 4
    assert [family.name for family in FAMILIES.values()] == list(FAMILIES)
    assert tuple(family.model_name for family in FAMILIES.values()) == MODELS
