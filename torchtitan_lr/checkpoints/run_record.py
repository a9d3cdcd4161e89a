# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A run's record in its dump folder: the configuration it trains with, and what was changed.

The record is ``job_config.json``. A run that is resumed with another learning rate keeps both
values: the record's key ``changes`` lists them with the step after which the new one holds.
"""

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import RUN_CONFIG, write_whole
from torchtitan_lr.config.files import read_json
from torchtitan_lr.optim.entries import unread_keys
from torchtitan_lr.titan import logger

CHANGES = "changes"
"""Key of the record: a list of ``{"after_step": n, "optimizer.lr": [before, after], ...}``."""

BATCH = "global_batch_size"
"""Key of the record: sequences per step of all ranks, also where the run's setting is -1."""

ENVIRONMENT = "environment"
"""Key of the record: `environment_of` the last start."""
RANKS, _LAYOUT = "ranks", "parallelism"
"""What a change of the layout is listed under: the number of ranks, and the section's keys."""

_RANKS = ("low_rank.rank", "low_rank.rank_attention", "low_rank.rank_ffn")
_EXCLUDED = "checkpoint.exclude_from_loading"

_SECTIONS = (
    *("model", "low_rank", "caat", "training", "optimizer", "lr_scheduler"),
    "grad_compression",
)

# Keys that change no number of a resumed run. The tokenizer and the reading order are compared
# with those of the checkpoint.
WITHOUT_EFFECT = frozenset(
    {
        *("model.hf_assets_path", "model.tokenizer_path", "model.print_after_conversion"),
        "training.dataloader",
        *("training.shuffle", "training.shuffle_seed", "training.enable_cpu_offload"),
        *("training.token_folder", "training.check_memory"),
        *("training.step_graph", "lr_scheduler.warmup_ratio"),  # the ratio sets warmup_steps
        *("training.gc_freq", "training.gc_debug", "training.allow_changed_corpus"),
        *("training.max_bad_records", "training.max_skipped_steps", "optimizer.implementation"),
        *("optimizer.tsr_refresh", "optimizer.tsr_overlap_buckets"),
    }
)


def record_path(config: Any) -> Path:
    """Return the path of a run's record; the file may not exist."""
    return Path(config.job.dump_folder) / (config.job.save_config_file or RUN_CONFIG)


def read_record(config: Any) -> dict[str, Any]:
    """Return the record in the dump folder of a configuration; {} without a readable one."""
    try:
        return read_json(record_path(config))
    except (OSError, ValueError):
        return {}


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
    return {RANKS: ranks, "tokens_per_step": tokens, "torch": torch, "commit": commit()}


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


def changed(record: dict[str, Any], config: Any, ranks: int = 1) -> dict[str, list[Any]]:
    """Return the keys that change what a resumed run computes.

    A resumed run applies each of them, or `torchtitan_lr.checks.stored` refuses it
    (``tests/unit/training/test_resume.py`` goes through all keys).

    Returns:
        ``[recorded value, value now]`` by dotted key; for a key that the record lacks, the default
        is the recorded value.
    """
    now = json.loads(json.dumps(config.to_dict()))  # tuples become lists, as in the record
    pairs: dict[str, list[Any]] = {}
    for section in _SECTIONS:
        before = record.get(section)
        if isinstance(before, dict):  # a damaged record may hold anything
            defaults = json.loads(json.dumps(asdict(type(getattr(config, section))())))
            for key, here in now.get(section, {}).items():
                pairs[f"{section}.{key}"] = [before.get(key, defaults[key]), here]
    # The sequences of all ranks count; the local batch only splits them.
    if (batch := record.get(BATCH)) is not None:
        pairs.pop("training.local_batch_size", None)
        pairs["training.global_batch_size"] = [batch, global_batch_size(config, ranks)]
    unused = [key for key in pairs if _is_unused(key, config)]
    return {
        key: [was, is_now]
        for key, (was, is_now) in pairs.items()
        if not _is_same(key, was, is_now) and key not in WITHOUT_EFFECT and key not in unused
    }


def _layout_changes(record: dict[str, Any], config: Any, ranks: int) -> dict[str, list[Any]]:
    """Return what differs in the layout, which changes no more than a result's last digits."""
    before, now = record.get(_LAYOUT), json.loads(json.dumps(config.to_dict()[_LAYOUT]))
    found = record.get(ENVIRONMENT)
    pairs = {RANKS: [found.get(RANKS, ranks) if isinstance(found, dict) else ranks, ranks]}
    if isinstance(before, dict):  # a damaged record may hold anything
        pairs |= {f"{_LAYOUT}.{key}": [before.get(key, here), here] for key, here in now.items()}
    return {key: [was, here] for key, (was, here) in pairs.items() if was != here}


def changes_losses(changes: dict[str, list[Any]]) -> bool:
    """Return whether one of these changes, of a run's record, changes losses."""
    return any(key != RANKS and not key.startswith(f"{_LAYOUT}.") for key in changes)


def _is_same(key: str, was: object, here: object) -> bool:
    """Return whether a key has the same value, as far as a record can tell.

    A rank of 0 is another key's, or the flavor's, which only the model knows: a resumed run's is
    compared with the checkpoint's.
    """
    return was == here or (key in _RANKS and 0 in (was, here))


def _is_unused(key: str, config: Any) -> bool:
    """Return whether this run does not read a key, since it has another optimizer or no codec."""
    if key.startswith(unread_keys(config.optimizer.name)):
        return True
    section, _, name = key.partition(".")
    return (
        section == "grad_compression"
        and name != "codec"
        and config.grad_compression.codec == "none"
    )


def described(changes: dict[str, list[Any]]) -> str:
    """Return changes as text: ``optimizer.lr = 0.001 (was 0.003)``."""
    return ", ".join(f"{key} = {now!r} (was {was!r})" for key, (was, now) in changes.items())


def left_out(config: Any, step: int) -> list[str]:
    """Return the states of ``checkpoint.exclude_from_loading`` that a run does not load at a step.

    The key acts once: what the run has saved since is loaded whole, also by restarts. It acts again
    with ``checkpoint.load_step``, or after a start without it.

    Args:
        config: A run's ``JobConfig``.
        step: The step that is resumed; -1 for another run's checkpoint.
    """
    names, record = list(config.checkpoint.exclude_from_loading), read_record(config)
    section = record.get("checkpoint")
    before = section.get("exclude_from_loading") if isinstance(section, dict) else None
    if step == -1 or config.checkpoint.load_step != -1 or not isinstance(before, list):
        return names
    since = dict.fromkeys(map(str, before), 0)
    for entry in _entries(record):
        found = str(entry.get(_EXCLUDED))  # a damaged record may hold anything
        since |= {name: entry["after_step"] for name in since if repr(name) in found}
    return [name for name in names if since.get(name, step) >= step]


def _entries(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a record's list of changes that are not damaged."""
    listed = record.get(CHANGES)
    return [
        entry
        for entry in (listed if isinstance(listed, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("after_step"), int)
    ]


def write_record(
    config: Any, step: int, ranks: int = 1, excluded: Sequence[str] = ()
) -> dict[str, list[Any]]:
    """Write the record of a run that resumes ``step``; 0 is a new run, which has no changes.

    A record that is damaged, wholly or in its list of changes, is kept beside the new one.

    Args:
        config: The run's ``JobConfig``.
        step: The step.
        ranks: Number of ranks.
        excluded: States of the step's checkpoint that were not loaded.

    Returns:
        What changed since the record before; empty for a new run.
    """
    path, found = record_path(config), read_record(config)
    listed, entries = found.get(CHANGES, []), _entries(found)
    tables = all(isinstance(found.get(section, {}), dict) for section in _SECTIONS)
    if path.is_file() and not (found and tables and entries == listed):
        aside = path.with_name(f"{path.name}.damaged")
        path.replace(aside)
        logger.warning("%s is damaged: it is kept as %s and written anew", path, aside)
    changes = changed(found, config, ranks) | _layout_changes(found, config, ranks) if step else {}
    if step and excluded:
        changes[_EXCLUDED] = [[], list(excluded)]
    history = [entry for entry in entries if entry["after_step"] <= step] if step else []
    new = {"after_step": step, **changes}
    history += [new] if changes and new not in history else []
    record = config.to_dict() | {BATCH: global_batch_size(config, ranks)}
    record[ENVIRONMENT] = environment_of(config, ranks)
    record |= {CHANGES: history} if history else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record, indent=2))
    return changes
