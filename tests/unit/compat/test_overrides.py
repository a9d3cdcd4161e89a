# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What our own code overrides or repeats of upstream's."""

import hashlib
import inspect

import pytest

from tests.unit.compat.doors import changed, parameters, resolve
from tests.unit.compat.overrides import OVERRIDES, REWRITES


@pytest.mark.parametrize("override", OVERRIDES, ids=lambda override: override.ours)
def test_an_overridden_method_is_there_and_called(override):
    want = changed(override.upstream, "overrides.OVERRIDES")
    assert parameters(resolve(override.upstream)) == override.parameters, want
    name = override.upstream.rpartition(".")[2]
    assert f".{name}(" in inspect.getsource(resolve(override.caller)), want
    owner, _, method = override.ours.rpartition(".")
    assert method == name
    assert method in vars(resolve(owner)), f"{override.ours} overrides nothing"


@pytest.mark.parametrize("rewrite", REWRITES, ids=lambda rewrite: rewrite.ours)
def test_rewritten_functions_have_not_changed_upstream(rewrite):
    assert callable(resolve(rewrite.ours))
    source = inspect.getsource(resolve(rewrite.upstream))
    digest = hashlib.sha256(source.encode()).hexdigest()[: len(rewrite.digest)]
    assert digest == rewrite.digest, (
        f"{rewrite.upstream} has changed: compare it with {rewrite.ours}, then write {digest} into "
        "tests/unit/compat/overrides.py"
    )
