# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The programs in ``scripts/`` as modules: the folder is no package."""

import importlib.util
from typing import Any

from tests.commands import ROOT


def load_script(name: str) -> Any:
    """Import a script anew; ``name`` is its path below ``scripts/`` without the suffix."""
    path = ROOT / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
