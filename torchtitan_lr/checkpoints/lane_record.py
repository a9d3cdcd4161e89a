# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a checkpoint says about the lanes of its model.

Weights have the same names and shapes for every number of lanes G and every shared fraction p, but
they are those of another function: loaded with other values they would go on, silently wrong. So
every checkpoint of a model with lanes holds (G, p), and one without it has one lane.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_lr.checkpoints.layout import LANES
from torchtitan_lr.checkpoints.safe_metadata import load, read_metadata
from torchtitan_lr.errors import ConfigError

Lanes = tuple[int, float]
"""G and p."""

ORDINARY: Lanes = (1, 1.0)
"""Of a model without lanes."""


def record_of(lanes: Lanes) -> dict[str, Tensor]:
    """Return what to save beside a model's weights: a tensor (2,); nothing for an ordinary one."""
    if lanes == ORDINARY:
        return {}
    return {LANES: torch.tensor(lanes, dtype=torch.float64)}


def stored_lanes(step_dir: str | Path, metadata: Metadata | None = None) -> Lanes:
    """Read G and p from a DCP folder, without any collective."""
    metadata = metadata or read_metadata(step_dir)
    if LANES not in metadata.state_dict_metadata:
        return ORDINARY
    stored: dict[str, Any] = {LANES: torch.zeros(2, dtype=torch.float64)}
    load(stored, step_dir, no_dist=True, metadata=metadata)
    lanes, fraction = stored[LANES].tolist()
    return int(lanes), fraction


def check_lanes(step_dir: str | Path, lanes: Lanes, metadata: Metadata | None = None) -> None:
    """Refuse a checkpoint of a model with other lanes, before its weights are loaded.

    A model's fingerprint has its lanes, too. This check is for the checkpoints whose fingerprint is
    not compared: those without a manifest, and those of another model.

    Args:
        step_dir: The folder of a complete checkpoint.
        lanes: G and p of the model at hand.
        metadata: The checkpoint's table of contents, where it has been read already.

    Raises:
        ConfigError: They are not those of the checkpoint.
    """
    stored = stored_lanes(step_dir, metadata)
    for name, here, there in zip(("lanes", "sync_fraction"), lanes, stored, strict=True):
        if here != there:
            want = f"{there:g} as in the checkpoint {step_dir}, whose model is another one"
            raise ConfigError(f"caat.{name}", here, want)
