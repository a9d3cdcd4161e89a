# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""All that this package uses of torchtitan: another version changes this room only.

The modules are split by what importing them loads: this one neither torch nor torchtitan,
`configuration` torch, `base` what ``import torchtitan`` loads anyway, `specs` ``datasets`` too.
"""

# Tested with torchtitan 0.2.2, the last release with TOML files and TrainSpec, which pyproject.toml
# pins: 0.3.0 has neither JobConfig nor the builders, specs and adapters that this room imports.
import logging

# Both are stated again, not imported: the launcher and the checks start without torch.
IGNORE_INDEX = -100
"""The label that no loss counts: torchtitan's, and the default of torch's cross entropy."""

logger = logging.getLogger()  # torchtitan's logger, which is the root logger
