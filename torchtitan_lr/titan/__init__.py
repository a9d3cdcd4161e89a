# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""All that this package uses of torchtitan: another version changes this room only.

The modules are split by what importing them loads: this one neither torch nor torchtitan, `base`
what ``import torchtitan`` loads anyway, `specs` ``datasets`` too.
"""

# Tested with torchtitan 0.2.2, the last release with TOML files and TrainSpec, which pyproject.toml
# pins: 0.3.0 has neither JobConfig nor the builders, specs and adapters that this room imports.
import importlib
import importlib.util
import logging
import sys
from typing import Any

# Both are stated again, not imported: the launcher and the checks start without torch.
IGNORE_INDEX = -100
"""The label that no loss counts: torchtitan's, and the default of torch's cross entropy."""

logger = logging.getLogger()  # torchtitan's logger, which is the root logger


def _config_module() -> Any:
    """Import ``torchtitan.config`` without the package's slow ``__init__``, unless that has run."""
    name = "torchtitan"
    if name not in sys.modules and (spec := importlib.util.find_spec(name)) is not None:
        # Finds the package's modules, although it is not executed.
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            return importlib.import_module(f"{name}.config")
        finally:
            del sys.modules[name]
    return importlib.import_module(f"{name}.config")


def merged_job_config(extension: Any) -> Any:
    """Return torchtitan's JobConfig merged with the sections of an extension."""
    # Upstream merges only inside its command-line parser, which exits the process on an error.
    # Calls ``ConfigManager._merge_configs``; if it is gone, every start fails with an
    # AttributeError.
    config = _config_module()
    return config.ConfigManager._merge_configs(config.JobConfig, extension)


def fill_job_config(config_class: Any, values: dict[str, Any]) -> Any:
    """Return an instance of a merged JobConfig, given checked values by section and key."""
    # Calls ``ConfigManager._dict_to_dataclass``, with the same risk; the manager's other tasks
    # (parsing text, checking the tokenizer) are done before or after.
    return _config_module().ConfigManager()._dict_to_dataclass(config_class, values)
