# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Build the configuration of a run from a TOML file and the command line.

This needs no process group: the launcher does it before any rank starts, and every rank again.
"""

import importlib
import importlib.util
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from torchtitan_lr.compat.interpreter import collector_off
from torchtitan_lr.config.parse import (
    CONFIG_FILE_KEY,
    Override,
    apply_overrides,
    check_toml,
    load_toml,
    split_arguments,
)
from torchtitan_lr.config.paths import user_path
from torchtitan_lr.config.ranges import check_ranges
from torchtitan_lr.config.schema import AC_MODES, MODELS, TP_PLANS
from torchtitan_lr.config.shipped import find_config
from torchtitan_lr.errors import ConfigError

REGISTERED = {
    "model.name": MODELS,
    "parallelism.tp_plan": TP_PLANS,
    "activation_checkpoint.mode": AC_MODES,
}
"""Known values of the keys to which ``experimental.custom_import`` may add some."""


def build_job_config(argv: list[str]) -> Any:
    """Build the configuration from ``--job.config_file`` and command-line overrides.

    Args:
        argv: Arguments without the program's name, e.g.
            ``["--job.config_file", "train_configs/debug_cola.toml", "--training.steps=10"]``.
            The name of a shipped file, ``debug_cola``, is as good as its path.

    Returns:
        torchtitan's JobConfig with the sections of ``torchtitan_lr.config.schema`` merged in.

    Raises:
        ConfigError: The file is missing or not TOML, a key is unknown, a type is wrong.
    """
    overrides = [
        Override(CONFIG_FILE_KEY, find_config(override.value))  # of a shipped name
        if override.key == CONFIG_FILE_KEY and override.value
        else override
        for override in split_arguments(argv)
    ]
    paths = [override.value for override in overrides if override.key == CONFIG_FILE_KEY]
    if paths and paths[-1] == "":
        raise ConfigError(CONFIG_FILE_KEY, "", "a TOML file such as train_configs/debug_cola.toml")
    raw = load_toml(paths[-1]) if paths and paths[-1] else {}
    if paths and paths[-1] and not raw:
        raise ConfigError(CONFIG_FILE_KEY, paths[-1], "a TOML file with settings; it has none")

    return _fill(raw, overrides)


def config_of_record(record: dict[str, Any], argv: list[str]) -> Any:
    """Build the configuration of a run again from its saved record and command-line overrides.

    Args:
        record: Sections of the record; keys that this version does not have are ignored.
        argv: Overrides, as for :func:`build_job_config`.

    Returns:
        The same as :func:`build_job_config`; what the record lacks has its default.

    Raises:
        ConfigError: A value does not fit its key.
    """
    return _fill(_known(record, config_class()), split_arguments(argv))


def _known(table: dict[str, Any], section: Any) -> dict[str, Any]:
    """Return the part of a table whose keys the dataclass has."""
    types = {option.name: option.type for option in fields(section)}
    return {
        name: _known(value, types[name])
        if is_dataclass(types[name]) and isinstance(value, dict)
        else value
        for name, value in table.items()
        if name in types
    }


def _fill(raw: dict[str, Any], overrides: list[Override]) -> Any:
    """Check a table and its overrides, and return the configuration."""
    config_cls = config_class()
    from torchtitan_lr.titan.configuration import fill_job_config

    _import_unknown(raw, overrides)
    values = apply_overrides(check_toml(raw, config_cls), overrides, config_cls)
    check_ranges(values, config_cls)
    _check_import(values.get("experimental", {}).get("custom_import"))
    if (folder := values.get("job", {}).get("dump_folder")) is not None:
        if not folder.strip():
            raise ConfigError("job.dump_folder", folder, "a folder such as ./outputs")
        if folder.startswith("~"):  # which shells do not expand after "="
            values["job"]["dump_folder"] = str(user_path(folder, "job.dump_folder"))
    return fill_job_config(config_cls, values)


@cache
def config_class() -> Any:
    """Return torchtitan's JobConfig merged with ``torchtitan_lr.config.schema``."""
    from torchtitan_lr.config import schema as extension
    from torchtitan_lr.titan.configuration import merged_job_config

    # Called late: it imports torch, which takes seconds; a wrong path is reported first.
    with collector_off():
        return merged_job_config(extension.JobConfig)


def _import_unknown(raw: dict[str, Any], overrides: list[Override]) -> None:
    """Import ``experimental.custom_import`` for an unknown name: the module may register it."""
    given = {
        f"{section}.{key}": value
        for section, table in raw.items()
        if isinstance(table, dict)
        for key, value in table.items()
    } | {override.key: override.value for override in overrides}
    names = [(given.get(key), known) for key, known in REGISTERED.items()]
    unknown = any(isinstance(name, str) and name not in known for name, known in names)
    module = given.get("experimental.custom_import")
    if unknown and isinstance(module, str) and module:
        _check_import(module)
        importlib.import_module(module)


def _check_import(module: str | None) -> None:
    """Raise if a module does not exist; the ranks import it later."""
    if not module:
        return
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):  # parent missing, or not a valid module name
        found = False
    if not found:
        raise ConfigError("experimental.custom_import", module, "a module that can be imported")
