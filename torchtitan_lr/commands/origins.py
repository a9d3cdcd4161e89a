# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run would use: every key of its configuration with its value and its origin."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import RUN_CONFIG, STEP_FILE, is_complete
from torchtitan_lr.checkpoints.record import DamagedError, read_step
from torchtitan_lr.checkpoints.run_record import CHANGES, described
from torchtitan_lr.checks.values import check_model
from torchtitan_lr.config import parse
from torchtitan_lr.config.build import build_job_config, config_class, with_own_rates
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.paths import shown_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.environment import read_environment
from torchtitan_lr.launch.placement import check_machines, place
from torchtitan_lr.models.configured import llama_args
from torchtitan_lr.optim.entries import ENTRIES
from torchtitan_lr.titan.base import drop_marker

DEFAULT, FLAVOR, SHARE = "default", "flavor", "warmup_ratio"
COMMAND_LINE, LAUNCHER, RUN = "command line", "launcher", "run"

_SHAPE = "model."  # prefix of the flavor's values that are no keys, such as ``model.dim``

_CONFIGURED = (
    *("family", "vocab_size", "max_seq_len", "rank_", "activation", "lax_gate", "init_seed"),
    *("lanes", "sync_fraction", "backward_sum"),
)
"""Beginnings of a model's arguments that keys set."""


@dataclass(frozen=True)
class Setting:
    """One value of a run."""

    key: str  # the dotted key
    value: Any  # what the run uses; for a key that leaves its value to the flavor, the flavor's
    origin: str  # `DEFAULT`, `FLAVOR`, `SHARE`, `COMMAND_LINE`, `LAUNCHER`, `RUN` or the TOML file
    # Whether a TOML file can set it; False for a value that only the flavor has
    is_key: bool = True


def read_origins(config: str, overrides: Sequence[str]) -> tuple[list[Setting], str]:
    """Read a configuration as a run on this machine would; a note says what does not run here."""
    arguments = [f"--{parse.CONFIG_FILE_KEY}={config}", *overrides]
    built = build_job_config(arguments)
    origins: dict[str, str] = {}
    files, given, name = (
        parse.toml_files(built.job.config_file),
        _set_by(arguments),
        built.optimizer.name,
    )
    named = name if "optimizer.name" in given else None
    kept = with_own_rates([*files.values()], named)
    for (file, values), own in zip(files.items(), kept, strict=True):
        origins |= dict.fromkeys(set(_leaves(values)) - set(_leaves(own)), f"{DEFAULT} of {name}")
        origins |= dict.fromkeys(_leaves(own), shown_config(file))
    for key in ENTRIES[name].defaults:
        origins.setdefault(key, f"{DEFAULT} of {name}")
    origins |= dict.fromkeys(given, COMMAND_LINE)
    if built.lr_scheduler.warmup_ratio >= 0:
        origins["lr_scheduler.warmup_steps"] = SHARE
    else:  # the file's, if it has one, gave way
        origins.pop("lr_scheduler.warmup_ratio", None)
    try:
        placed = place(read_environment(), arguments)
        built, note = placed.config, placed.note and f"note: {placed.note}"
        origins |= dict.fromkeys(_set_by(placed.arguments[len(arguments) :]), LAUNCHER)
        check_machines(built, placed.environment, placed.device, data="find")
    except ConfigError as error:
        note = f"note: it does not run here: {error}"
    check_model(built, 1, "cpu")
    found = [Setting(key, value, origins.get(key, DEFAULT)) for key, value in _values(built)]
    return _with_flavor(found, built), note


def read_run(folder: Path) -> tuple[list[Setting], str]:
    """Read what a run or a saved step was trained with, and a line about what was changed in it."""
    try:
        if is_complete(folder):
            record = dict(read_step(folder).run)
        else:
            record = read_json(folder / RUN_CONFIG)
    except (DamagedError, OSError, ValueError) as error:
        want = f"the folder of a run, with {RUN_CONFIG}, or of a step, with {STEP_FILE} ({error})"
        raise ConfigError("CONFIG", str(folder), want) from error
    built, usual = build_job_config([], record), dict(_values(config_class()()))
    found = []
    for key, value in _values(built):
        found.append(Setting(key, value, DEFAULT if value == usual[key] else RUN))
    changes = [
        f"after step {entry.pop('after_step')}: {described(entry)}"
        for entry in record.get(CHANGES, [])
    ]
    return _with_flavor(found, built), f"note: changed {'; '.join(changes)}" if changes else ""


def as_toml(settings: Sequence[Setting]) -> str:
    """Format settings as a TOML file with origins; what it cannot say is a comment."""
    lines: list[str] = []
    section = ""
    for setting in settings:
        table, _, name = setting.key.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
            section = table
        said = setting.is_key and setting.value is not None and setting.origin != SHARE
        comment = "" if said else "# "
        lines.append(f"{f'{comment}{name} = {_text(setting.value)}':<55} # {setting.origin}")
    return "\n".join(lines)


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested tables."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _set_by(arguments: Sequence[str]) -> list[str]:
    """Return the keys that overrides set; ``--a.no_b`` sets ``a.b``."""
    return list(
        _leaves(parse.apply_overrides({}, parse.split_arguments(list(arguments)), config_class()))
    )


def _values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a configuration with their values; sub-sections follow a section's keys."""
    inner = []
    for option in dataclasses.fields(section):
        value = getattr(section, option.name)
        if dataclasses.is_dataclass(value):
            inner.append((value, f"{prefix}{option.name}."))
        else:
            yield prefix + option.name, value
    for value, name in inner:
        yield from _values(value, name)


def _with_flavor(settings: list[Setting], config: Any) -> list[Setting]:
    """Replace what is left to the flavor by its values, and add those that no key can change."""
    args = llama_args(config)
    if args is None:
        return settings
    by_key = {setting.key: setting for setting in settings}
    taken = {"model.vocab_size": args.vocab_size, "low_rank.activation": args.activation}
    if not args.low_rank:
        del taken["low_rank.activation"]
    for group in ("attention", "ffn") if args.low_rank else ():
        taken[f"low_rank.rank_{group}"] = getattr(args, f"rank_{group}")
    common = by_key["low_rank.rank"]
    for key, value in taken.items():
        if by_key[key].value in (0, "flavor"):
            shared = key.startswith("low_rank.rank_") and common.value
            by_key[key] = Setting(key, value, common.origin if shared else FLAVOR)
    shape = {_SHAPE + name: value for name, value in drop_marker(asdict(args)).items()}
    found: list[Setting] = []
    for setting in by_key.values():
        found.append(setting)
        if setting.key == [key for key in by_key if key.startswith(_SHAPE)][-1]:
            found += [
                Setting(key, value, FLAVOR, is_key=False)
                for key, value in shape.items()
                if not key.removeprefix(_SHAPE).startswith(_CONFIGURED)
            ]
    return found


def _text(value: Any) -> str:
    """Return a value as TOML; None, which is shown in comments only, as JSON."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_text(item)}' for key, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)
