# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A run's record: the configuration it trains with, where, and what was changed.

``job_config.json`` in the dump folder is the record of the last start, and each saved step has the
one it was trained with. A run that is resumed with another learning rate keeps both values: the
record's key ``changes`` lists them with the step after which the new one holds.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import RUN_CONFIG, write_whole
from torchtitan_lr.config.schema import Meaning, meaning_of

CHANGES = "changes"
"""Key of the record: a list of ``{"after_step": n, "optimizer.lr": [before, after], ...}``."""

ENVIRONMENT = "environment"  # key of the record: `environment_of` the last start

_LAYOUT = (ENVIRONMENT, "parallelism")  # of the ranks, not of the training


def record_path(config: Any) -> Path:
    """Return the path of a run's record; the file may not exist."""
    return Path(config.job.dump_folder) / (config.job.save_config_file or RUN_CONFIG)


def data_ranks(config: Any, ranks: int) -> int:
    """Return the data-parallel degree of a run: the number of ranks that read different rows."""
    layout = config.parallelism
    others: int = layout.tensor_parallel_degree * layout.pipeline_parallel_degree
    return max(1, ranks // (others * layout.context_parallel_degree))


def global_batch_size(config: Any, ranks: int) -> int:
    """Return the sequences per step of all ranks together."""
    training = config.training
    whole = training.local_batch_size * data_ranks(config, ranks)
    return int(training.global_batch_size if training.global_batch_size > 0 else whole)


def environment_of(config: Any, ranks: int) -> dict[str, Any]:
    """Return what else a comparison of runs depends on: ranks, tokens per step, torch, our code."""
    tokens = global_batch_size(config, ranks) * config.training.seq_len
    torch = metadata.version("torch").partition("+")[0]
    return {"ranks": ranks, "tokens_per_step": tokens, "torch": torch, "commit": commit()}


@cache
def commit() -> str:
    """Return the commit of the package's clone, marked if it was changed, else its version."""
    root = Path(__file__).parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    if (root / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
            return done.stdout.strip()
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("torchtitan_lr")
    return "unknown"


def run_record(config: Any, ranks: int) -> dict[str, Any]:
    """Return the record of a run, without changes; its batch is that of all ranks."""
    record: dict[str, Any] = json.loads(json.dumps(config.to_dict()))  # tuples become lists
    record["training"]["global_batch_size"] = global_batch_size(config, ranks)
    return record | {ENVIRONMENT: environment_of(config, ranks)}


def changed(
    before: Mapping[str, Any], now: Mapping[str, Any], left_out: Sequence[str] = ()
) -> dict[str, list[Any]]:
    """Return what a resumed run changes, ``[before, now]`` by dotted key, from two records.

    ``left_out`` names the states that were not loaded.
    """
    listed = {Meaning.APPLIED, Meaning.OPTIMIZER}
    if "dataloader" in left_out:
        listed.add(Meaning.DATA)
    was, changes = by_key(before), dict[str, list[Any]]()
    for key, here in by_key(now).items():
        if meaning_of(key) in listed and was.get(key, here) != here:
            changes[key] = [was[key], here]
    if left_out:
        changes["checkpoint.exclude_from_loading"] = [[], list(left_out)]
    return changes


def by_key(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record's values by their dotted keys."""
    found: dict[str, Any] = {}
    for section, table in record.items():
        if isinstance(table, dict):
            found |= {f"{section}.{key}": value for key, value in table.items()}
    return found


def changes_losses(changes: Mapping[str, list[Any]]) -> bool:
    """Return whether one of these changes, of a run's record, changes losses."""
    return any(not key.startswith(_LAYOUT) for key in changes)


def described(changes: Mapping[str, list[Any]]) -> str:
    """Return changes as text: ``optimizer.lr = 0.001 (was 0.003)``."""
    return ", ".join(f"{key} = {now!r} (was {was!r})" for key, (was, now) in changes.items())


def write_record(config: Any, record: Mapping[str, Any]) -> None:
    """Write the record of a run into its dump folder."""
    path = record_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record, indent=2))
