# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What our own code overrides or repeats of upstream's."""

import ast
import hashlib
import importlib
import importlib.util
import inspect
import re

import pytest

from tests.commands import ROOT
from tests.unit.compat.doors import changed, parameters, resolve
from torchtitan_lr.compat.overrides import OVERRIDES, REWRITES

PACKAGE = ROOT / "torchtitan_lr"


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda override: override.ours)
def test_an_overridden_method_is_there_and_called(override):
    want = changed(override.upstream, "overrides.OVERRIDES")
    assert parameters(resolve(override.upstream)) == override.parameters, want
    name = override.upstream.rpartition(".")[2]
    assert f".{name}(" in inspect.getsource(resolve(override.caller)), want
    owner, _, method = override.ours.rpartition(".")
    assert method == name
    assert method in vars(resolve(owner)), f"{override.ours} overrides nothing"


def test_every_overridden_private_method_is_listed():
    """In the classes of modules that define a private method at all."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        classes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)]
        # Hooks of transformers in exported models, and of lm_eval, which is an extra.
        if path.parent.name == "hf" or path.name == "harness.py":
            continue
        private = [c.name for c in classes if c.bases and any(map(is_private_method, c.body))]
        if not private:
            continue
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts))
        for cls in (getattr(module, name) for name in private):
            above = [
                base for base in cls.__mro__ if not base.__module__.startswith("torchtitan_lr")
            ]
            inherited = set().union(*(vars(base) for base in above))
            found |= {
                f"{module.__name__}:{cls.__name__}.{name}"
                for name, value in vars(cls).items()
                if inspect.isfunction(value) and re.fullmatch(r"_[a-z]\w*", name)
                if name in inherited
            }
    assert found == {override.ours for override in OVERRIDES}


def is_private_method(node):
    return isinstance(node, ast.FunctionDef) and re.fullmatch(r"_[a-z]\w*", node.name)


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.ours)
def test_rewritten_functions_have_not_changed_upstream(rewrite):
    assert callable(resolve(rewrite.ours))
    source = inspect.getsource(resolve(rewrite.upstream))
    digest = hashlib.sha256(source.encode()).hexdigest()[: len(rewrite.digest)]
    assert digest == rewrite.digest, (
        f"{rewrite.upstream} has changed: compare it with {rewrite.ours}, then write {digest} into "
        "torchtitan_lr/compat/overrides.py"
    )
