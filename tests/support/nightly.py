# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Cases that only ``--full`` runs; the default suite has others of their kind."""

from typing import Any

import pytest


def nightly(*cases: Any) -> list[Any]:
    """Return cases for ``parametrize``, marked nightly; a tuple is one case's arguments."""
    each = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.nightly) for case in each]
