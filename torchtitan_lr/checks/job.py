# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Refuses, in one line, a configuration that cannot work.

It is pure and needs no process group: the launcher calls it before any rank starts, and every rank
again.
"""

from typing import Any

from torchtitan_lr.checks.compression import check_grad_compression
from torchtitan_lr.checks.optimizer import check_tsr
from torchtitan_lr.checks.pipeline import check_pipeline
from torchtitan_lr.checks.support import SUPPORT_CHECKS, check_tensor_parallel
from torchtitan_lr.checks.values import FILE_CHECKS, VALUE_CHECKS


def check_job_config(
    config: Any, world_size: int, device_type: str, on_paper: bool = False
) -> None:
    """Refuses a configuration that cannot run.

    Args:
        config: What :func:`build_job_config` returned.
        world_size: Number of ranks of the whole run.
        device_type: ``cpu``, ``cuda`` or ``xpu``: where the ranks will compute.
        on_paper: Whether nothing will run, so that no tokenizer, corpus or checkpoint is needed.

    Raises:
        ConfigError: The first thing found that cannot work.
    """
    parts = (check_tensor_parallel, check_pipeline, check_tsr, check_grad_compression)
    for check in (*SUPPORT_CHECKS, *VALUE_CHECKS, *parts):
        if not (on_paper and check in FILE_CHECKS):
            check(config, world_size, device_type)
