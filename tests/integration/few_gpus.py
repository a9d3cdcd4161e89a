# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The launcher of a machine that has as many GPUs as the file ``GPUS`` says."""

import os
import sys
from pathlib import Path

from torchtitan_lr.launch import launcher, placement


def gpu_count():
    """What the machine's driver would say."""
    return int(Path(os.environ["GPUS"]).read_text())


def lost_devices(ranks):
    """What the launcher finds after a failure."""
    count = gpu_count()
    return f"NGPU: got {ranks}, expected {placement.fewer(count)}" if ranks > count else ""


if __name__ == "__main__":
    placement.gpu_count, placement.lost_devices = gpu_count, lost_devices
    sys.exit(launcher.main())
