# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a checkpoint says about the lanes of its model.

Weights have the same names and shapes for every number of lanes G and every shared fraction p, but
they are those of another function: loaded with other values they would go on, silently wrong. So
every checkpoint of a model with lanes holds (G, p), and one without it has one lane.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torchtitan_lr.errors import ConfigError

RECORD = "caat"
"""Name of the record among a checkpoint's states: a tensor (2,) in fp64."""

Lanes = tuple[int, float]
"""G and p."""

ORDINARY: Lanes = (1, 1.0)
"""Of a model without lanes."""


def record_of(lanes: Lanes) -> dict[str, Tensor]:
    """Return what to save beside a model's weights; nothing for an ordinary model."""
    if lanes == ORDINARY:
        return {}
    return {RECORD: torch.tensor(lanes, dtype=torch.float64)}


def stored_lanes(step_dir: str | Path) -> Lanes:
    """Read G and p from a DCP folder, without any collective.

    Args:
        step_dir: The folder of a complete checkpoint.
    """
    reader = dcp.FileSystemReader(str(step_dir))
    if RECORD not in reader.read_metadata().state_dict_metadata:
        return ORDINARY
    stored: dict[str, Any] = {RECORD: torch.zeros(2, dtype=torch.float64)}
    with warnings.catch_warnings():
        # DCP warns that it runs without a process group, which is what we ask for.
        warnings.simplefilter("ignore")
        dcp.load(stored, checkpoint_id=str(step_dir), no_dist=True)
    lanes, fraction = stored[RECORD].tolist()
    return int(lanes), fraction


def check_lanes(step_dir: str | Path, lanes: Lanes) -> None:
    """Refuse a checkpoint of a model with other lanes, before its weights are loaded.

    Args:
        step_dir: The folder of a complete checkpoint.
        lanes: G and p of the model at hand.

    Raises:
        ConfigError: They are not those of the checkpoint.
    """
    stored = stored_lanes(step_dir)
    for name, here, there in zip(("lanes", "sync_fraction"), lanes, stored, strict=True):
        if here != there:
            want = f"{there:g} as in the checkpoint {step_dir}, whose model is another one"
            raise ConfigError(f"caat.{name}", here, want)
