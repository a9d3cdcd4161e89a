# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks that a run can write its output files, before it starts."""

import os
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.layout import RUN_CONFIG
from torchtitan_lr.config.paths import user_path
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.training.history import HISTORY_FILE


def check_dump_folder(config: Any, world_size: int, device_type: str) -> None:
    """Check that the dump folder, its folders and its files exist or can be created."""
    folder = Path(os.path.abspath(config.job.dump_folder))
    _check_folder(folder, "job.dump_folder", config.job.dump_folder)
    profiling, metrics = config.profiling, config.metrics
    written = {
        "checkpoint.folder": config.checkpoint.enable,
        "metrics.save_tb_folder": metrics.enable_tensorboard or metrics.enable_wandb,
        "profiling.save_traces_folder": profiling.enable_profiling,
        "profiling.save_memory_snapshot_folder": profiling.enable_memory_snapshot,
        "comm.save_traces_folder": config.comm.trace_buf_size > 0,
        "training.token_cache": bool(config.training.token_cache),
    }
    for key in (key for key, used in written.items() if used):
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        _check_folder(folder / user_path(value, key), key, value)
    for name in (HISTORY_FILE, config.job.save_config_file or RUN_CONFIG):
        path = folder / name
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            want = f"a folder in which {name} is a file to write to, which {path} is not"
            raise ConfigError("job.dump_folder", config.job.dump_folder, want)


def _check_folder(folder: Path, key: str, value: str) -> None:
    """Raise for a folder that cannot be created or written to."""
    user_path(str(folder), key)
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    ok = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    if not ok:
        lets = "lets you make" if nearest.is_dir() else "does not block: it is a file"
        raise ConfigError(key, value, f"a folder that {nearest} {lets}")
