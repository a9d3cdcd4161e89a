# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Build the configuration of a run from a TOML file and the command line."""

# This needs no process group: the launcher does it before any rank starts, and every rank again.
import importlib
import math
import os
import sys
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, get_origin

from torchtitan_lr.compat.interpreter import collector_off
from torchtitan_lr.config import parse, schema
from torchtitan_lr.config.paths import expanded, find_config
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.optim.entries import ENTRIES, like, unread_keys
from torchtitan_lr.titan import fill_job_config, merged_job_config

_PATHS = ("folder", "path", "_file", "_csv", "flavor")  # how names of keys of paths end
_IMPORT_KEY = "experimental.custom_import"
_RATIO, _STEPS = "warmup_ratio", "warmup_steps"


def build_job_config(argv: list[str], record: dict[str, Any] | None = None) -> Any:
    """Build the configuration from ``--job.config_file`` and command-line overrides.

    `record` is a run's saved one, read instead of a file: unknown keys are ignored. It may be
    somebody else's: a module that it names is not imported.
    """
    overrides, path = parse.split_arguments(argv), None
    for place, (key, value) in enumerate(overrides):
        if key == parse.CONFIG_FILE_KEY:
            path = find_config(value) if value else value
            overrides[place] = parse.Override(key, path)
    if record is not None:
        layers = [{name: table for name, table in record.items() if name != "experimental"}]
    else:
        layers = [] if path is None else [*parse.toml_files(path).values()]
        want = "a TOML file with settings; it has none"
        require(any(layers) or path is None, parse.CONFIG_FILE_KEY, path, want)
    return _fill(layers, overrides, record is not None)


def _fill(layers: list[dict[str, Any]], overrides: list[parse.Override], of_record: bool) -> Any:
    """Check tables, of a record only its known keys, and overrides; return the configuration."""
    config_cls = config_class()
    experimental = parse.merge_tables(layers).get("experimental")
    named = experimental.get("custom_import") if isinstance(experimental, dict) else None
    module = dict(overrides).get(_IMPORT_KEY, named)
    if isinstance(module, str) and module != schema.Experimental.custom_import:
        import_extension(module)  # its names become known, its faults are told before ranks start
    layers = [parse.check_toml(layer, config_cls, skip_unknown=of_record) for layer in layers]
    given = parse.typed_overrides(overrides, config_cls)
    own = with_own_rates(layers, given.get("optimizer", {}).get("name"))
    values = parse.merge_tables([*own, given])
    name = values.get("optimizer", {}).get("name", schema.Optimizer.name)
    model = values.get("model", {}).get("name", schema.Model.name)
    defaults: dict[str, dict[str, Any]] = {}
    for key, value in ENTRIES[name].defaults_of(model).items():
        section, _, option = key.partition(".")
        defaults.setdefault(section, {})[option] = value
    values = parse.merge_tables([defaults, values])
    _check_ranges(values, config_cls, unread_keys(name))
    _set_warmup(values, [] if of_record else [*layers, given])
    folder = values.get("job", {}).get("dump_folder", ".")
    require(folder.strip(), "job.dump_folder", folder, "a folder such as ./outputs")
    if not of_record:  # which has the expanded ones
        _expand_paths(values)
    return fill_job_config(config_cls, values)


def with_own_rates(layers: list[dict[str, Any]], last: str | None) -> list[dict[str, Any]]:
    """Return tables, later ones last, without the rates that they set for another optimizer."""
    rules, name = [], schema.Optimizer.name
    for layer in layers:
        name = layer.get("optimizer", {}).get("name", name)
        rules.append(like(name))
    found = []
    for layer, rule in zip(layers, rules, strict=True):
        if rule != like(last or name):
            given = layer.get("optimizer", {}).items()
            kept = {key: value for key, value in given if key not in ("lr", "adamw_lr")}
            layer = layer | {"optimizer": kept}
        found.append(layer)
    return found


def _check_ranges(values: dict[str, Any], config_cls: Any, unread: tuple[str, ...]) -> None:
    """Raise for the first value out of its key's range, of keys not beginning as in ``unread``."""
    sections: dict[str, Any] = {section.name: section.type for section in fields(config_cls)}
    for section, table in values.items():
        types: dict[str, Any] = {option.name: option.type for option in fields(sections[section])}
        for name, value in table.items():
            key, annotation = f"{section}.{name}", types[name]
            if key.startswith(unread):  # sweeps set them for all methods
                continue
            own = annotation.__metadata__ if get_origin(annotation) is Annotated else ()
            for allowed in (*own, schema.RANGES_OF_TORCHTITAN.get(key)):
                if isinstance(allowed, schema.Range) and not allowed.holds(value):
                    raise ConfigError(key, value, allowed.want)


def _set_warmup(values: dict[str, Any], layers: list[dict[str, Any]]) -> None:
    """Set ``warmup_steps`` by ``warmup_ratio``, unless a later table sets it."""
    setting = _RATIO
    for table in [layer.get("lr_scheduler", {}) for layer in layers]:
        found = [name for name in (_RATIO, _STEPS) if table.get(name, -1) != -1]
        want = "either it or warmup_steps"
        require(len(found) < 2, f"lr_scheduler.{_RATIO}", table.get(_RATIO), want)
        setting = found[0] if found else setting
    schedule, default = values.setdefault("lr_scheduler", {}), config_class()()
    if setting == _STEPS:
        schedule[_RATIO] = -1.0
    elif (ratio := schedule.get(_RATIO, default.lr_scheduler.warmup_ratio)) >= 0:
        steps = values.get("training", {}).get("steps", default.training.steps)
        schedule[_STEPS] = math.floor(ratio * (schedule.get("total_steps") or steps) + 1e-9)


def _expand_paths(values: dict[str, Any], prefix: str = "") -> None:
    """Expand every path of a configuration here: what is checked later is what is used."""
    for name, value in values.items():
        if isinstance(value, dict):
            _expand_paths(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            for table in (each for each in value if isinstance(each, dict)):
                _expand_paths(table, f"{prefix}{name}.")
        elif isinstance(value, str) and name.endswith(_PATHS):
            values[name] = expanded(value, prefix + name)


def import_extension(module: str | None) -> None:
    """Import the module of ``experimental.custom_import``, installed or in the working folder."""
    if not module:
        return
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        importlib.import_module(module)
    except ImportError as error:
        want = f"a module that can be imported ({error})"
        raise ConfigError(_IMPORT_KEY, module, want) from error


@cache
def config_class() -> Any:
    """Return torchtitan's JobConfig merged with the sections of ``torchtitan_lr.config.schema``."""
    # Called late: it imports torch, which takes seconds; a wrong path is reported first.
    with collector_off():
        return merged_job_config(schema.JobConfig)
