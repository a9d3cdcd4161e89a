# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The model families of this package."""

from torchtitan_lr.models.families.cola import CoLA
from torchtitan_lr.models.families.family import (
    FAMILIES,
    ModelFamily,
    find_family,
    register_family,
)
from torchtitan_lr.models.families.full import Full
from torchtitan_lr.models.families.lax import LaX
from torchtitan_lr.models.families.svd import SVD

__all__ = ["FAMILIES", "ModelFamily", "find_family", "register_family"]

for _family in (Full(), SVD(), CoLA(), LaX()):
    register_family(_family)
