# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What all replicas of a run must have in common, compared before any number is exchanged.

A replica with another rank, schedule or batch would send collectives of other sizes, which gloo
answers by ending the process.
"""

from dataclasses import asdict
from typing import Any

from torchtitan_lr.errors import ConfigError

Fingerprint = dict[str, Any]
"""JSON values by TOML key."""

_SECTIONS = ("optimizer", "lr_scheduler", "low_rank", "training", "activation_checkpoint")

_MAY_DIFFER = {
    "training.dataset_path",  # the corpus itself is compared
    "training.gc_freq",
    "training.gc_debug",
    "training.allow_changed_corpus",
    "training.dataloader",
    "training.enable_cpu_offload",
}

_SHARED = {
    "fault_tolerance": ("group_size", "min_replica_size", "process_group_timeout_ms"),
    "checkpoint": ("enable", "interval", "last_save_model_only"),
    "debug": ("seed",),
    "parallelism": ("tensor_parallel_degree", "tp_plan"),
}


def run_fingerprint(config: Any, model: dict[str, Any], corpus: str, ranks: int = 1) -> Fingerprint:
    """Return the settings that determine the sums, the schedule and the batches of a run.

    Args:
        config: The run's configuration.
        model: The model's fingerprint, with its tokenizer.
        corpus: The corpus' fingerprint.
        ranks: Ranks of a replica; equal ones send to one another.
    """
    found = {**model, "training.dataset": corpus, "NGPU": ranks}
    for section in _SECTIONS:
        for key, value in asdict(getattr(config, section)).items():
            name = f"{section}.{key}"
            if name not in _MAY_DIFFER and name not in found:
                found[name] = value
    for section, keys in _SHARED.items():
        found |= {f"{section}.{key}": getattr(getattr(config, section), key) for key in keys}
    return found


def check_same(here: Fingerprint, there: Fingerprint, who: str) -> None:
    """Raise if two replicas belong to different runs.

    Raises:
        ConfigError: The first key that differs.
    """
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) != there.get(key):
            raise ConfigError(key, here.get(key), f"{there.get(key)!r}, as {who} have")
