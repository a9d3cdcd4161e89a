# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Entry point of every rank.

Start it with ``python -m torchtitan_lr.launch`` or with ``torchrun -m torchtitan_lr.train
--job.config_file FILE``.
"""

import os
import sys
from contextlib import ExitStack

from torchtitan_lr.compat.interpreter import collector_off
from torchtitan_lr.launch.processes import end_with_torchrun, exit_without_teardown

with collector_off():
    # Call this before the slow imports: torchrun may be killed during them.
    end_with_torchrun()

    import torch
    from torchtitan.tools.logging import init_logger

    from torchtitan_lr.training.trainer import Trainer

from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.environment import launched_ranks
from torchtitan_lr.launch.folder_lock import locked_by_rank
from torchtitan_lr.training.device import bind_device
from torchtitan_lr.training.guard import BadDataError, NonFiniteError


def main(argv: list[str] | None = None, trainer_class: type[Trainer] = Trainer) -> int:
    """Train with the configuration of the command line.

    Args:
        argv: Arguments without the program's name, as for torchtitan; ``sys.argv[1:]`` by default.
        trainer_class: The trainer to build.

    Returns:
        The exit status: 0 if training finished or was stopped and saved, 1 for a non-finite loss
        or bad data, 2 for an invalid configuration.
    """
    init_logger()
    device_type = bind_device()
    trainer: Trainer | None = None
    lock = ExitStack()
    try:
        config = build_job_config(sys.argv[1:] if argv is None else argv)
        check_job_config(config, launched_ranks(config.comm.mode), device_type)
        lock.enter_context(locked_by_rank(config.job.dump_folder, os.environ))
        trainer = trainer_class(config)
        if config.checkpoint.create_seed_checkpoint:
            trainer.write_record()
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    except (ConfigError, NonFiniteError, BadDataError) as error:
        # Print on every rank: torchrun kills the other ranks as soon as any rank fails.
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        if trainer is not None:
            trainer.close()
        lock.close()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    exit_without_teardown(main())
