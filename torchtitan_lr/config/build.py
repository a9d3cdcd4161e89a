# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Build the configuration of a run from a TOML file and the command line."""

# This needs no process group: the launcher does it before any rank starts, and every rank again.
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from functools import cache
from typing import Any

from torchtitan_lr.compat.interpreter import collector_off
from torchtitan_lr.config.parse import (
    CONFIG_FILE_KEY,
    Override,
    apply_overrides,
    check_toml,
    merge_tables,
    split_arguments,
    toml_files,
)
from torchtitan_lr.config.paths import expanded, find_config
from torchtitan_lr.config.ranges import check_ranges
from torchtitan_lr.config.removed import by_key, refuse_removed, refuse_removed_run
from torchtitan_lr.config.schema import (
    AC_MODES,
    CODEC_NAMES,
    DEFAULTS_OF,
    ITS_MODULE,
    MODELS,
    OPTIMIZERS,
    TP_PLANS,
    TSR,
    Experimental,
    JobConfig,
    base_of,
)
from torchtitan_lr.errors import ConfigError, require

_PATHS = ("folder", "path", "_file", "_csv", "flavor")  # how names of keys of paths end
_IMPORT_KEY = "experimental.custom_import"
_SCHEDULE = {"training.steps", "lr_scheduler.total_steps", "lr_scheduler.warmup_steps"}

REGISTERED = {
    "model.name": MODELS,
    "parallelism.tp_plan": TP_PLANS,
    "activation_checkpoint.mode": AC_MODES,
    "grad_compression.codec": CODEC_NAMES,
    "optimizer.name": OPTIMIZERS,
}
"""Known values of the keys to which ``experimental.custom_import`` may add some."""


def build_job_config(argv: list[str], record: dict[str, Any] | None = None) -> Any:
    """Build the configuration from ``--job.config_file`` and command-line overrides.

    Args:
        argv: Arguments such as ``["--job.config_file", "debug_cola", "--training.steps=10"]``,
            with the name of a shipped file or a path.
        record: The saved record of a run, instead of a file. Its keys that this version does not
            have are ignored; what it lacks has its default. It may be somebody else's: modules that
            it names are neither looked up nor imported (`import_extension`).

    Returns:
        torchtitan's JobConfig with the sections of ``torchtitan_lr.config.schema`` merged in.

    Raises:
        ConfigError: The file is missing or not TOML, a key is unknown, a type is wrong.
    """
    overrides, path = split_arguments(argv), None
    for place, (key, value) in enumerate(overrides):
        if key == CONFIG_FILE_KEY:
            path = find_config(value) if value else value
            overrides[place] = Override(key, path)
    if path == "":
        raise ConfigError(CONFIG_FILE_KEY, "", "a TOML file such as train_configs/debug_cola.toml")
    if record is not None:
        layers = [without_code(record)]
    else:
        layers = [*toml_files(path).values()] if path else []
        want = "a TOML file with settings; it has none"
        require(any(layers) or not path, CONFIG_FILE_KEY, path, want)
    return _fill(layers, overrides, record is not None)


def _fill(layers: list[dict[str, Any]], overrides: list[Override], of_record: bool) -> Any:
    """Check tables, of a record only its known keys, and overrides; return the configuration."""
    raw = merge_tables(layers)
    given = by_key(raw) | dict(overrides)
    refuse_removed(dict(overrides) if of_record else given)
    config_cls = config_class()
    from torchtitan_lr.titan.configuration import fill_job_config

    module = given.get(_IMPORT_KEY)
    if isinstance(module, str) and module != Experimental.custom_import:
        import_extension(module)  # its names become known, its faults are told before ranks start
    checked = check_record(raw) if of_record else check_toml(raw, config_cls)
    values = apply_overrides(checked, overrides, config_cls)
    base = base_of(values.get("optimizer", {}).get("name", ""))
    _set_defaults(values, base)
    check_ranges(values, config_cls, tsr=base == TSR)
    _set_warmup(values, layers, overrides)
    folder = values.get("job", {}).get("dump_folder", ".")
    require(folder.strip(), "job.dump_folder", folder, "a folder such as ./outputs")
    if not of_record:  # which has the expanded ones
        _expand_paths(values)
    return fill_job_config(config_cls, values)


def _set_defaults(values: dict[str, Any], base: str) -> None:
    """Give the keys that are not set the defaults of the optimizer that the run's is or changes."""
    for key, value in DEFAULTS_OF.get(base, {}).items():
        section, _, option = key.partition(".")
        values.setdefault(section, {}).setdefault(option, value)


def _set_warmup(
    values: dict[str, Any], layers: list[dict[str, Any]], overrides: list[Override]
) -> None:
    """Shorten the warm-up with the steps, see `warmup_steps`."""
    command_line: dict[str, Any] = {}
    for key in _SCHEDULE & dict(overrides).keys():
        section, _, option = key.partition(".")
        command_line.setdefault(section, {})[option] = values[section][option]
    warmup = warmup_steps([*layers, command_line])
    schedule = values.get("lr_scheduler", {})
    if warmup != schedule.get("warmup_steps", config_class()().lr_scheduler.warmup_steps):
        values["lr_scheduler"] = schedule | {"warmup_steps": warmup}


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


def warmup_steps(layers: Sequence[dict[str, Any]]) -> int:
    """Return the warm-up of tables, each of which replaces values of those before it.

    A table that sets the steps alone, and leaves no more of them than the warm-up has, keeps the
    share of warm-up from before. Otherwise all steps of ``cola_60m --training.steps=100``, or of
    a file that includes ``cola_60m``, would be warm-up.

    Args:
        layers: The defaults of torchtitan go before these tables.
    """
    default = config_class()()
    whole, warmup = default.training.steps, default.lr_scheduler.warmup_steps
    steps, total = whole, None
    for layer in layers:
        share = warmup / max(1, whole)
        steps = _integer(layer, "training", "steps") or steps
        total = _integer(layer, "lr_scheduler", "total_steps") or total
        whole, own = total or steps, _integer(layer, "lr_scheduler", "warmup_steps")
        if own is not None:
            warmup = own
        elif warmup >= whole:
            warmup = round(share * whole)
    return int(warmup)


def _integer(table: dict[str, Any], section: str, option: str) -> int | None:
    """Return a value; None where a table that others replace has another type."""
    found = table.get(section)
    value = found.get(option) if isinstance(found, dict) else None
    return value if isinstance(value, int) else None


def without_code(record: dict[str, Any]) -> dict[str, Any]:
    """Return a run's record without the names of modules: a run that is read chooses no code."""
    kept = {name: table for name, table in record.items() if name != "experimental"}
    if isinstance(job := kept.get("job"), dict):
        kept["job"] = {key: value for key, value in job.items() if key != "custom_config_module"}
    return kept


def check_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return the known keys of a run's record, or of some of its sections.

    Raises:
        ConfigError: A value has a wrong type, a plan is unknown, or weights of such a run are no
            longer read.
    """
    refuse_removed_run(record, resumes=False)
    try:
        return check_toml(record, config_class(), skip_unknown=True)
    except ConfigError as error:
        if error.key not in REGISTERED:
            raise
        raise ConfigError(error.key, error.got, f"{error.want}, or {ITS_MODULE}") from error


def import_extension(module: str | None) -> None:
    """Import the module that a command line or its TOML names by ``experimental.custom_import``.

    It may be in the working directory, where the ranks find it too; installed modules go first.

    Raises:
        ConfigError: The module cannot be imported.
    """
    if not module:
        return
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        importlib.import_module(module)
    except ImportError as error:
        want = f"a module that can be imported ({error})"
        raise ConfigError(_IMPORT_KEY, module, want) from error
    except Exception as error:  # of the module's own code, or of a name such as "..x"
        where = traceback.extract_tb(error.__traceback__)[-1]
        fault = f"{type(error).__name__}: {error}, {where.filename}:{where.lineno}"
        raise ConfigError(_IMPORT_KEY, module, f"a module that runs ({fault})") from error


@cache
def config_class() -> Any:
    """Return torchtitan's JobConfig merged with the sections of ``torchtitan_lr.config.schema``."""
    from torchtitan_lr.titan.configuration import merged_job_config

    # Called late: it imports torch, which takes seconds; a wrong path is reported first.
    with collector_off():
        return merged_job_config(JobConfig)
