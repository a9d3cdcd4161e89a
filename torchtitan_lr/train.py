# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Entry point of every rank.

Start it with ``torchtitan-lr train`` or with ``torchrun -m torchtitan_lr.train
--job.config_file FILE``.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

from torchtitan_lr.compat.interpreter import collector_off
from torchtitan_lr.launch.processes import end_with_torchrun, exit_without_teardown

with collector_off():
    # Call this before the slow imports: torchrun may be killed during them.
    end_with_torchrun()

    import torch

    # Our models, also where `experimental.custom_import` names another module.
    import torchtitan_lr.training.register  # noqa: F401
    from torchtitan_lr.training.trainer import Trainer

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.console.log import init_console
from torchtitan_lr.data.prepare import prepare_for_ranks
from torchtitan_lr.errors import ConfigError, RunFailedError, describe_error, escaped
from torchtitan_lr.launch.check_once import checked_once
from torchtitan_lr.launch.environment import launched_ranks
from torchtitan_lr.launch.folder_lock import StillOurs, locked_by_rank
from torchtitan_lr.launch.run_state import (
    DIVERGED,
    EXIT_STATUS,
    FAILED,
    FAILURES,
    FINISHED,
    REFUSED,
    RUNNING,
    STOPPED,
    holder_named,
    write_state,
)
from torchtitan_lr.titan.device import bind_device
from torchtitan_lr.training.verdict import NonFiniteError


def main(argv: list[str] | None = None, trainer_class: type[Trainer] = Trainer) -> int:
    """Train with the configuration of the command line.

    Args:
        argv: Arguments without the program's name, as for torchtitan; ``sys.argv[1:]`` by default.
        trainer_class: The trainer to build.

    Returns:
        The exit status: `EXIT_STATUS` of how the run ended.
    """
    init_console()
    device_type = bind_device()
    trainer: Trainer | None = None
    lock = ExitStack()
    status, began = EXIT_STATUS[FAILED], time.time()
    record: Callable[..., None] = _no_record
    try:
        config = build_job_config(sys.argv[1:] if argv is None else argv)
        init_console(config.metrics.verbose)
        folder, ranks = config.job.dump_folder, launched_ranks(config.comm.mode)
        check = partial(_check, config, ranks, device_type)
        checked_once(folder, check, partial(prepare_for_ranks, config))
        still_ours = lock.enter_context(locked_by_rank(folder, os.environ))
        record = partial(_record, folder, still_ours, began)
        trainer = trainer_class(config)
        trainer.checkpointer.before_save = still_ours
        trainer.metrics_processor.before_writing = still_ours
        trainer.before_start = partial(record, RUNNING)
        trainer.more_summary = partial(_sent, config, trainer.parallel_dims.world_size)
        trainer.train()
        status = 0
        if trainer.stopped_by:
            why = f"{trainer.stopped_by} after step {trainer.step}"
            record(STOPPED, why, step=trainer.step)
        else:
            record(FINISHED, step=trainer.step)
    except (ConfigError, RunFailedError) as error:
        state = REFUSED if isinstance(error, ConfigError) else FAILED
        state = DIVERGED if isinstance(error, NonFiniteError) else state
        record(state, str(error), getattr(error, "rank", None), getattr(error, "step", None))
        # Print on every rank: torchrun kills the other ranks as soon as any rank fails.
        print(escaped(f"error: {error}"), file=sys.stderr, flush=True)
        status = EXIT_STATUS[state]
    except Exception as error:
        line = describe_error(error)
        why = line or f"{type(error).__name__}: {error}".partition("\n")[0]
        record(FAILED, why.removeprefix("error: "), step=getattr(trainer, "step", None))
        if line is None:
            raise
        logging.getLogger(__name__).info(line, exc_info=True)  # its place is in details.log
        print(escaped(line), file=sys.stderr, flush=True)
    finally:
        if trainer is not None:
            trainer.metrics_processor.exit_status = status
            # A run that has failed has told why; what fails in its wake is no news.
            with suppress(Exception) if status else nullcontext():
                trainer.close()
        lock.close()
    if status == 0:
        torch.distributed.destroy_process_group()
    return status


def _check(config: Any, ranks: int, device_type: str) -> None:
    """Check the configuration; a refusal in the folder of a running job names that job."""
    with holder_named(config.job.dump_folder):
        check_job_config(config, ranks, device_type)


def _record(
    dump_folder: str,
    still_ours: StillOurs,
    began: float,
    state: str,
    error: str = "",
    rank: int | None = None,
    step: int | None = None,
) -> None:
    """Record the run's state, unless the folder is another run's by now.

    Rank 0 does it; a failure is recorded by whichever rank has it first.
    """
    here = int(os.environ.get("RANK", "0"))
    if here and state not in FAILURES:
        return
    if state == FAILED and rank is None:
        rank = here
    with suppress(ConfigError):
        still_ours()
        write_state(dump_folder, state, error, rank, step, began)


def _sent(config: Any, ranks: int) -> dict[str, int]:
    """Return `sent_per_step`; its room is imported at the end of a run, on one rank."""
    from torchtitan_lr.costs.step_traffic import sent_per_step

    return sent_per_step(config, ranks)


def _no_record(*_: Any, **__: Any) -> None:
    """Record nothing: the folder belongs to another job, or is unknown."""


if __name__ == "__main__":
    exit_without_teardown(main())
