# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What has left the project: keys, values and options, each refused with what works instead.

A run's record names every key. One with a key that has left is read all the same, unless its value
was one of those that are lost.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchtitan_lr.errors import ConfigError


class Removed(NamedTuple):
    """A key that has left, or one that has lost some of its values."""

    instead: str
    """What works in its place, as a phrase: ``false``, ``no such key``."""
    lost: Callable[[Any], bool] = lambda value: True
    """Whether a value is lost, as a TOML, a record or (a text, None for a flag) a command line
    has it."""
    key_stays: bool = False
    """Whether the key has other values."""
    weights_stay: bool = False
    """Whether the weights of a run with a lost value are read; the run is not resumed."""
    last: str = "8020035a"
    """The last commit that reads it."""


def _is_on(flag: Any) -> bool:
    return str(flag).lower() != "false"


def _is_experiment(module: Any) -> bool:
    return str(module).startswith("torchtitan_lr.experiments")


_REPLICAS = "no such key: replicas that come and go are gone"

REMOVED: dict[str, Removed] = {
    "CONFIG": Removed(
        "a configuration of `torchtitan-lr config list`",
        lost=("debug_replicas",).__contains__,
        key_stays=True,
    ),
    "torchtitan-lr evaluate": Removed(
        "an export of --format hf, and `lm_eval --model hf` on it",
        lost=("--tasks", "--task_path", "--num_fewshot").__contains__,
        key_stays=True,
    ),
    "fault_tolerance.enable": Removed("false", lost=_is_on, key_stays=True, weights_stay=True),
    "job.custom_config_module": Removed(
        "'torchtitan_lr.config.schema'", lost=_is_experiment, key_stays=True, weights_stay=True
    ),
    **dict.fromkeys(
        (
            *("fault_tolerance.lighthouse", "fault_tolerance.address", "fault_tolerance.digests"),
            *("fault_tolerance.quorum_timeout_s", "fault_tolerance.heal_timeout_s"),
        ),
        Removed(_REPLICAS, weights_stay=True),
    ),
}
"""By dotted key; ``CONFIG`` are the shipped configurations, ``torchtitan-lr COMMAND`` the options
of a command."""


def by_key(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a TOML file, or of a record, by dotted key; nothing is checked."""
    return {
        f"{section}.{key}": value
        for section, table in values.items()
        if isinstance(table, dict)
        for key, value in table.items()
    }


def refuse_removed(settings: Mapping[str, Any]) -> None:
    """Raise for a removed key, or a lost value, of a TOML or a command line.

    Args:
        settings: Values by dotted key, of a command line as text.

    Raises:
        ConfigError: It names the key and the last commit that reads it.
    """
    for key, value in settings.items():
        entry = REMOVED.get(key)
        if entry is not None and (entry.lost(value) or not entry.key_stays):
            raise _refusal(key, value, entry)


def refuse_removed_run(record: Mapping[str, Any], resumes: bool) -> None:
    """Raise for a run with a lost value.

    Args:
        record: The run's record, or some sections of it.
        resumes: Whether the run is to go on, and not only its weights are read.

    Raises:
        ConfigError: It names the key and the last commit that reads it.
    """
    for key, value in by_key(record).items():
        entry = REMOVED.get(key)
        if entry is not None and entry.lost(value) and (resumes or not entry.weights_stay):
            raise _refusal(key, value, entry)


def _refusal(key: str, value: Any, entry: Removed) -> ConfigError:
    what = f"{entry.instead} (removed: {entry.last} is the last commit that reads it)"
    return ConfigError(key, value, what)
