# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the tests of every door to upstream share.

A failure names the private name of upstream and the door in ``torchtitan_lr/compat`` to mend.
"""

import importlib
import inspect


def changed(upstream, door):
    """What to say where upstream is not what a door expects."""
    return f"upstream changed: {upstream}; mend torchtitan_lr/compat: {door}"


def parameters(function):
    return tuple(name for name in inspect.signature(function).parameters if name != "self")


def resolve(name):
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in filter(None, path.split(".")):
        assert hasattr(found, part), changed(name, "the table that names it")
        found = getattr(found, part)
    return found
