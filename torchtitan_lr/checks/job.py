# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The check of a whole configuration, in one process, without a process group."""

from collections.abc import Callable, Set
from typing import Any, Literal

from torchtitan_lr.checks.compression import check_grad_compression
from torchtitan_lr.checks.memory import check_memory
from torchtitan_lr.checks.optimizer import check_groups, check_outside, check_rates
from torchtitan_lr.checks.pipeline import check_pipeline
from torchtitan_lr.checks.stored import (
    check_record,
    check_resumable,
    check_stored_model,
    check_stored_optimizer,
    check_stored_states,
)
from torchtitan_lr.checks.support import (
    check_compile,
    check_context,
    check_cpu,
    check_parallelism,
    check_plans,
    check_step_graph,
)
from torchtitan_lr.checks.values import (
    check_checkpoint,
    check_corpora,
    check_data,
    check_dump_folder,
    check_model,
    check_training,
    check_vocabulary,
)
from torchtitan_lr.config.files import files_kept
from torchtitan_lr.errors import require

# Checks that build models come late. The last ones prepare data, which may take hours.
_CHECKS: tuple[Callable[[Any, int, str], None], ...] = (
    *(check_parallelism, check_compile, check_cpu, check_step_graph, check_training),
    *(check_dump_folder,),
    *(check_checkpoint, check_model, check_groups, check_rates, check_outside),
    *(check_vocabulary, check_corpora),
    *(check_stored_model, check_resumable, check_stored_optimizer),
    *(check_context, check_plans, check_pipeline, check_grad_compression, check_memory),
    *(check_data, check_stored_states),
)
_OF_TOKENS = {check_data, check_stored_states}

Data = Literal["prepare", "find", "none"]
"""How far a check goes with the corpora: it prepares them, only finds their files, or neither; with
"none" it does not ask for this machine's memory either."""

_LEFT_OUT: dict[Data, Set[Callable[[Any, int, str], None]]] = {
    "prepare": set(),
    "find": _OF_TOKENS,
    "none": _OF_TOKENS | {check_corpora, check_memory},
}

_OF_FILES = {
    *(check_dump_folder, check_checkpoint, check_vocabulary, check_corpora, check_memory),
    *(check_stored_model, check_resumable, check_stored_optimizer),
    *(check_data, check_stored_states),
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
    if not on_paper:
        check_record(config, world_size)  # first, since it takes no time
    with files_kept():
        for check in _CHECKS:
            if not (on_paper and check in _OF_FILES) and check not in _LEFT_OUT[data]:
                check(config, world_size, device_type)
