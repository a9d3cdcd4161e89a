# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""No private name of torch or torchtitan, and no patch of either, outside ``compat/``."""

import ast
import re
from collections import defaultdict

import pytest

from tests.commands import ROOT
from torchtitan_lr.compat.overrides import OVERRIDES

PACKAGE = ROOT / "torchtitan_lr"
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.parent.relative_to(PACKAGE).name != "compat"
)

PRIVATE = re.compile(r"_[A-Za-z]\w*(?<!__)")
PRIVATE_PATH = re.compile(r"(torch|torchtitan)(\.\w+)*\._\w+(\.\w+)*")

# Public, whatever their names say: torch documents the first ("Foreach Operations"), Python the
# second.
PUBLIC = re.compile(r"torch\._foreach_\w+|os\._exit")

# Names of ours, by file: nothing of upstream's is read or replaced.
OURS = {
    # A mark that a pipeline stage leaves on the tensor of a message.
    ("parallel/pipeline/boundaries.py", "setattr(operation.tensor, _MARK)"),
    ("parallel/pipeline/boundaries.py", "'_pipeline_boundary'"),
    # Ends of keys of the configuration.
    ("checks/support.py", "'_parallel_degree'"),
    ("checks/support.py", "'_degree'"),
    # A named tuple's own method, and ends of names of runs.
    ("optim/tsr/synchronize.py", "job._replace"),
    ("scaling/plan.py", "'_seed'"),
    ("scaling/plan.py", "'_lr'"),
    # Ends of the names of token ids.
    ("data/encoding.py", "'_id'"),
    ("hf/tokenizer.py", "'_id'"),
    # Code of exported models: transformers' documented attribute of models with checkpointing.
    ("hf/modeling_torchtitan_lr.py", "self._gradient_checkpointing_func"),
    # An attribute that a constructor which failed early has not set.
    ("training/checkpoint.py", "'_deleting'"),
}


def private_parts(path):
    return [part for part in path.split(".") if PRIVATE.fullmatch(part)]


class Own(ast.NodeVisitor):
    """The private names that each class of the package defines itself."""

    def __init__(self):
        self.names, self.bases = defaultdict(set), defaultdict(set)

    def visit_ClassDef(self, node):
        self.bases[node.name] |= {ast.unparse(base).split("[")[0] for base in node.bases}
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef):
                self.names[node.name].add(inner.name)
            elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                if ast.unparse(inner.value) == "self":
                    self.names[node.name].add(inner.attr)
            elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                self.names[node.name].add(inner.target.id)
        self.generic_visit(node)

    def of(self, name):
        return self.names[name].union(*(self.of(base) for base in self.bases[name] - {name}))


class Search(ast.NodeVisitor):
    """What a module reaches of upstream's private names and what it replaces."""

    def __init__(self, own):
        self.own, self.found, self.classes, self.methods = own, [], [], []
        self.imported = set()

    def note(self, node, what):
        self.found.append((node.lineno, what))

    def visit_ClassDef(self, node):
        self.classes.append(node.name)
        self.generic_visit(node)
        self.classes.pop()

    def visit_FunctionDef(self, node):
        self.methods.append(node.name)
        self.generic_visit(node)
        self.methods.pop()

    def visit_Import(self, node):
        for alias in node.names:
            self.imported.add((alias.asname or alias.name).split(".")[0])
            if private_parts(alias.name) or alias.name == "unittest.mock":
                self.note(node, f"import {alias.name}")

    def visit_ImportFrom(self, node):
        for alias in node.names:
            self.imported.add(alias.asname or alias.name)
            if node.module == "unittest.mock" or private_parts(f"{node.module}.{alias.name}"):
                self.note(node, f"from {node.module} import {alias.name}")

    def visit_Attribute(self, node):
        owner = ast.unparse(node.value)
        if PRIVATE.fullmatch(node.attr) and not PUBLIC.fullmatch(f"{owner}.{node.attr}"):
            if owner in ("self", "cls"):
                known = self.classes and node.attr in self.own.of(self.classes[-1])
            else:
                known = owner == "super()" and self.is_listed(node.attr)
            if not known:
                self.note(node, ast.unparse(node))
        if isinstance(node.ctx, ast.Store) and owner.split(".")[0] in self.imported:
            self.note(node, f"{ast.unparse(node)} = ...")
        self.generic_visit(node)

    def is_listed(self, name):
        here = f"{self.classes[-1]}.{name}"
        return name in self.methods and any(o.ours.endswith(f":{here}") for o in OVERRIDES)

    def visit_Call(self, node):
        called = ast.unparse(node.func)
        if called in ("setattr", "delattr") and ast.unparse(node.args[0]) != "self":
            self.note(node, f"{called}({ast.unparse(node.args[0])}, {ast.unparse(node.args[1])})")
        self.generic_visit(node)

    def visit_Constant(self, node):
        text = node.value
        if isinstance(text, str) and (PRIVATE.fullmatch(text) or PRIVATE_PATH.fullmatch(text)):
            self.note(node, repr(text))


def own_names(texts):
    own = Own()
    for text in texts:
        own.visit(ast.parse(text))
    return own


def search(text, own):
    found = Search(own)
    found.visit(ast.parse(text))
    return found.found


@pytest.fixture(scope="module")
def own():
    return own_names(path.read_text() for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_upstreams_private_names_stand_in_compat(path, own):
    name = str(path.relative_to(PACKAGE))
    found = [
        f"{name}:{line}: {what}"
        for line, what in search(path.read_text(), own)
        if (name, what) not in OURS
    ]
    assert not found, f"give these a door in torchtitan_lr/compat: {found}"


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "from torch.distributed.fsdp._fully_shard import x",
        "from torch.distributed.tensor.placement_types import _StridedShard",
        "from unittest.mock import patch",
        "import unittest.mock",
        "def f(x):\n    return x._local_tensor",
        "def f(m):\n    return m._get_fsdp_state()._fsdp_param_group",
        "getattr(x, '_local_tensor', x)",
        "import torchtitan.train as t\nt.CheckpointManager = None",
        "import torchtitan.train as t\nt.a.CheckpointManager = None",
        "setattr(module, 'device_type', 'cpu')",
        "values.pop('_enforced')",
        "importlib.import_module('torch._inductor.lowering')",
        "class A(Manager):\n    def f(self):\n        return self._create_checkpoint_id(1)",
        "class A(Adam):\n    def _init(self):\n        super()._init()",
        "class LlamaModel(M):\n    def f(self):\n        super()._apply(1)",
    ],
)
def test_a_private_name_would_be_found(text):
    assert search(text, own_names([text]))


def test_own_and_documented_names_are_not():
    text = """
import os
import torch
class A:
    _kind: str = "a"
    def __init__(self):
        self._x = self._make()
    def _make(self):
        return self._kind
class B(A):
    def f(self):
        torch._foreach_mul_(self._x, 2)
        os._exit(self.__class__.__name__ == "__main__")
class LlamaModel(M):
    def _apply(self, fn):
        return super()._apply(fn)
"""
    assert not search(text, own_names([text]))


def test_every_name_of_ours_is_still_needed(own):
    found = {
        (str(path.relative_to(PACKAGE)), what)
        for path in FILES
        for _, what in search(path.read_text(), own)
    }
    assert found == OURS
