# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What has left the project: keys, values and options, each refused with what works instead.

A run's record names every key. One with a key that has left is read all the same, unless its value
was one of those that are lost.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchtitan_lr.errors import ConfigError


class Removed(NamedTuple):
    """A key that has left, or one that has lost some of its values."""

    instead: str
    """What works in its place, as a phrase: ``false``, ``no such key``."""
    values: tuple[str, ...] = ()
    """The lost values, as text in lower case; () for all."""
    key_stays: bool = False
    """Whether the key has other values."""
    weights_stay: bool = False
    """Whether the weights of a run with a lost value are read; the run is not resumed."""
    last: str = "8020035a"
    """The last commit that reads it."""

    def lost(self, value: Any) -> bool:
        """Return whether a value of a TOML, a record or a command line is lost."""
        return not self.values or str(value).lower() in self.values


_OF_REPLICAS = Removed("no such key: replicas that come and go are gone", weights_stay=True)

REMOVED: dict[str, Removed] = {
    "CONFIG": Removed(
        "a configuration of `torchtitan-lr config list`", ("debug_replicas",), key_stays=True
    ),
    "torchtitan-lr evaluate": Removed(
        "an export of --format hf, and `lm_eval --model hf` on it",
        ("--tasks", "--task_path", "--num_fewshot"),
        key_stays=True,
    ),
    "torchtitan-lr generate": Removed(
        "no such option: the cache holds keys and values", ("--cache",), key_stays=True
    ),
    "parallelism.tp_plan": Removed("'btp', with caat.lanes = 1", ("btp_caat",), key_stays=True),
    "parallelism.tp_norm_stat": Removed(
        "no such key: the statistic has an all-reduce of its own", ("column",), weights_stay=True
    ),
    "job.custom_config_module": Removed(
        "'torchtitan_lr.config.schema'",
        ("torchtitan_lr.experiments.replicas.job_config",),
        key_stays=True,
        weights_stay=True,
    ),
    "fault_tolerance.enable": Removed("false", ("true",), key_stays=True, weights_stay=True),
    "fault_tolerance.lighthouse": _OF_REPLICAS,
    "fault_tolerance.address": _OF_REPLICAS,
    "fault_tolerance.quorum_timeout_s": _OF_REPLICAS,
    "fault_tolerance.heal_timeout_s": _OF_REPLICAS,
    "fault_tolerance.digests": _OF_REPLICAS,
}
"""By dotted key; ``CONFIG`` are the shipped configurations, ``torchtitan-lr COMMAND`` the options
of a command."""


def by_key(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a TOML file, or of a record, by dotted key; nothing is checked."""
    found: dict[str, Any] = {}
    for section, table in values.items():
        if isinstance(table, dict):
            found |= {f"{section}.{key}": value for key, value in table.items()}
    return found


def refuse_removed(settings: Mapping[str, Any]) -> None:
    """Raise for a removed key, or a lost value, of a TOML or a command line.

    Args:
        settings: Values by dotted key, of a command line as text; None for a flag, which is true.

    Raises:
        ConfigError: It names the key and the last commit that reads it.
    """
    for key, given in settings.items():
        entry, value = REMOVED.get(key), True if given is None else given
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
