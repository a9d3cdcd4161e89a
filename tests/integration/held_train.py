# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""`torchtitan_lr.train`, for ``TRAIN_FILE``, whose ranks stop (SIGSTOP) at one point until SIGCONT.

``HOLD`` is ``FOLDER:step:N``, where step N begins, on every rank, or ``FOLDER:saving:N``, where
rank 0 has all parts of checkpoint N but its ends, of the run whose dump folder has that name.
"""

import os
import signal
from pathlib import Path

from torch.distributed.checkpoint import filesystem

from tests.integration.few_gpus import gpu_count
from torchtitan_lr import train
from torchtitan_lr.launch import placement
from torchtitan_lr.launch.processes import begin_rank, exit_without_teardown
from torchtitan_lr.training.trainer import Trainer

FOLDER, POINT, STEP = os.environ["HOLD"].split(":")

_finish = filesystem.FileSystemWriter.finish


class HeldTrainer(Trainer):
    def train_step(self, data_iterator):
        hold("step", Path(self.job_config.job.dump_folder), self.step)
        super().train_step(data_iterator)


def finish(writer, *values, **keys):
    checkpoint = Path(writer.checkpoint_id)
    hold("saving", checkpoint.parents[1], int(checkpoint.name.removeprefix("step-")))
    return _finish(writer, *values, **keys)


def hold(point, folder, step):
    if (folder.name, point, str(step)) == (FOLDER, POINT, STEP):
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    begin_rank()  # in a fork the module of the ranks is imported already
    filesystem.FileSystemWriter.finish = finish
    if "GPUS" in os.environ:
        placement.gpu_count = gpu_count
    exit_without_teardown(train.main(trainer_class=HeldTrainer))
