# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The check of a whole configuration, in one process, without a process group."""

from collections.abc import Callable
from typing import Any, Literal

from torchtitan_lr.checks import stored, support, values

Check = Callable[[Any, int, str], None]
"""Takes the configuration, the number of ranks and the type of their device."""

# Checks by what they need beside the configuration. Those that build models come late. The last
# ones prepare data, which may take hours.
_CHECKS: tuple[tuple[Check, Literal["", "files", "corpora", "tokens"]], ...] = (
    (stored.check_other_run, "files"),  # first, since it takes no time
    (support.check_parallelism, ""),
    (support.check_checkpointing, ""),
    (support.check_step_graph, ""),
    (support.check_profiling, ""),
    (values.check_training, ""),
    (values.check_folders, "files"),
    (values.check_checkpoint, "files"),
    (values.check_model, ""),
    (support.check_optimizer, ""),
    (support.check_outer, ""),
    (values.check_vocabulary, "files"),
    (stored.check_stored, "files"),
    (values.check_corpora, "corpora"),
    (support.check_context, ""),
    (support.check_plans, ""),
    (support.check_pipeline, ""),
    (support.check_compression, ""),
    (values.check_memory, "corpora"),
    (values.check_data, "tokens"),
    (stored.check_stored_data, "tokens"),
)

Data = Literal["prepare", "find", "none", "paper", "prepared"]
"""How far a check goes: it prepares the corpora, only finds their files, or neither; ``paper``
reads no file of this machine; ``prepared`` is what is left where tokens were found earlier."""

_LEFT_OUT = {"prepare": set[str](), "find": {"tokens"}, "none": {"tokens", "corpora"}}
_LEFT_OUT |= {"paper": {"tokens", "corpora", "files"}, "prepared": {"", "files", "corpora"}}


def check_job_config(
    config: Any, world_size: int, device_type: str, data: Data = "prepare"
) -> None:
    """Raise a ConfigError for the first key with which a configuration cannot run."""
    for check, needs in _CHECKS:
        if needs not in _LEFT_OUT[data]:
            check(config, world_size, device_type)
