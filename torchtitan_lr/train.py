# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What every rank of a run executes.

``python -m torchtitan_lr.launch`` starts it; or ``torchrun -m torchtitan_lr.train --job.config_file
FILE`` does.
"""

import os
import sys
from contextlib import ExitStack

from torchtitan_lr.compat.interpreter import collector_off
from torchtitan_lr.launch.processes import end_with_torchrun, leave

with collector_off():
    # Before the imports, which take seconds: torchrun may be killed meanwhile.
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
    """Train as the command line says.

    Args:
        argv: Arguments after the program's name, as torchtitan's; the process's own by default.
        trainer_class: What trains.

    Returns:
        The exit status: 0 done or stopped and saved, 1 non-finite or bad data, 2 refused.
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
        # On every rank: torchrun ends the others when the first fails, whichever that is.
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        if trainer is not None:
            trainer.close()
        lock.close()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    leave(main())
