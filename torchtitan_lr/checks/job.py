# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The check of a whole configuration, in one process, without a process group."""

from collections.abc import Callable, Set
from typing import Any, Literal

from torchtitan_lr.checks import stored, support, values
from torchtitan_lr.checks.compression import check_grad_compression
from torchtitan_lr.checks.memory import check_memory
from torchtitan_lr.checks.rates import check_groups, check_outside, check_rates
from torchtitan_lr.checks.stages import check_pipeline
from torchtitan_lr.errors import require

# Checks that build models come late. The last ones prepare data, which may take hours.
_CHECKS: tuple[Callable[[Any, int, str], None], ...] = (
    stored.check_other_run,  # first, since it takes no time
    *(support.check_parallelism, support.check_compile, support.check_cpu),
    *(support.check_step_graph, values.check_training, values.check_dump_folder),
    *(values.check_checkpoint, values.check_model, check_groups, check_rates, check_outside),
    *(values.check_vocabulary, stored.check_stored, values.check_corpora),
    *(support.check_context, support.check_plans, check_pipeline, check_grad_compression),
    *(check_memory, values.check_data, stored.check_stored_data),
)
_OF_TOKENS = {values.check_data, stored.check_stored_data}

Data = Literal["prepare", "find", "none"]
"""How far a check goes with the corpora: it prepares them, only finds their files, or neither; with
"none" it does not ask for this machine's memory either."""

_LEFT_OUT: dict[Data, Set[Callable[[Any, int, str], None]]] = {
    "prepare": set(),
    "find": _OF_TOKENS,
    "none": _OF_TOKENS | {values.check_corpora, check_memory},
}

_OF_FILES = {
    *(values.check_dump_folder, values.check_checkpoint, values.check_vocabulary),
    *(values.check_corpora, values.check_data, check_memory, stored.check_stored_data),
    *(stored.check_other_run, stored.check_stored),
}

MOST_RANKS = 1 << 20  # lists by rank, or by pairs of ranks, fit in memory up to this number


def check_job_config(
    config: Any, world_size: int, device_type: str, on_paper: bool = False, data: Data = "prepare"
) -> None:
    """Raise a ConfigError for the first key with which a configuration cannot run.

    `on_paper` skips the checks of this machine's files and memory.
    """
    want = f"at most {MOST_RANKS} ranks: the product of the degrees, --world or NGPU"
    require(world_size <= MOST_RANKS, "parallelism", world_size, want)
    for check in _CHECKS:
        if not (on_paper and check in _OF_FILES) and check not in _LEFT_OUT[data]:
            check(config, world_size, device_type)
