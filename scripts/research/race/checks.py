# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the race's methods refuse, before a rank starts.

They are written for the race: replicas of a whole model, without checkpoints.
"""

from typing import Any

from torchtitan_lr.errors import require
from torchtitan_lr.models.configured import configured_args


def check_powersgd(config: Any, world_size: int, device_type: str) -> None:
    """Require replicas, all of whose gradients are finite: else the hook's residual would not be.

    A rank that has a part of the matrices would approximate each part by itself.
    """
    _check_replicas(config, world_size, least=2)
    _check_rejections(config)


def check_diloco(config: Any, world_size: int, device_type: str, fragments: int = 1) -> None:
    """Require replicas without checkpoints, and a block for each fragment."""
    _check_replicas(config, world_size, least=2)
    want = f"false with {_name(config)}: a checkpoint would mix the weights of its replicas"
    require(not config.checkpoint.enable, "checkpoint.enable", True, want)
    blocks = configured_args(config).n_layers
    want = f"a model of at least {fragments} blocks with {_name(config)}, a fragment each"
    want += f": this one has {blocks}"
    require(blocks >= fragments, "model.flavor", config.model.flavor, want)


def _check_replicas(config: Any, world_size: int, least: int) -> None:
    """Require that each rank is a replica with the whole model, and sums what is not rounded."""
    wire = config.training.mixed_precision_reduce
    want = f"'float32' with {_name(config)}, which does not round what it sends"
    require(wire == "float32", "training.mixed_precision_reduce", wire, want)
    key = "parallelism.data_parallel_replicate_degree"
    replicas = config.parallelism.data_parallel_replicate_degree
    want = f"the number of ranks ({world_size}), "
    if world_size < least:
        want += f"which must be at least {least}, "
    want += f"with {_name(config)}: each rank must be a replica with the whole model"
    require(replicas == world_size >= least, key, replicas, want)


def _check_rejections(config: Any) -> None:
    """Require that a gradient that is not finite ends the run: it stays in the residual."""
    key, skipped = "training.max_skipped_steps", config.training.max_skipped_steps
    want = f"0 with {_name(config)}, whose error feedback would keep what is not finite"
    require(skipped == 0, key, skipped, want)


def _name(config: Any) -> str:
    return f"optimizer.name = {config.optimizer.name!r}"
