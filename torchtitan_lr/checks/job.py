# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The check of a whole configuration, which raises one-line errors.

It needs no process group: the launcher calls it before any rank starts, and every rank calls it
again.
"""

from typing import Any

from torchtitan_lr.checks.compression import check_grad_compression
from torchtitan_lr.checks.optimizer import check_tsr
from torchtitan_lr.checks.pipeline import check_pipeline
from torchtitan_lr.checks.support import SUPPORT_CHECKS, check_tensor_parallel
from torchtitan_lr.checks.values import FILE_CHECKS, VALUE_CHECKS
from torchtitan_lr.config.build import extension_of
from torchtitan_lr.errors import ConfigError


def check_job_config(
    config: Any, world_size: int, device_type: str, on_paper: bool = False
) -> None:
    """Raise for a configuration that cannot run.

    Args:
        config: The result of :func:`build_job_config`.
        world_size: Number of ranks of the whole run.
        device_type: ``cpu``, ``cuda`` or ``xpu``: the device of the ranks.
        on_paper: Whether to skip the checks of tokenizer, corpus and checkpoint, for an estimate.

    Raises:
        ConfigError: With the first invalid key.
    """
    parts = (check_tensor_parallel, check_pipeline, check_tsr, check_grad_compression)
    if (extension := extension_of(config)) is not None:
        extension.check(config, world_size, device_type)
    elif config.fault_tolerance.enable:
        want = (
            "false, or job.custom_config_module = 'torchtitan_lr.experiments.replicas.job_config'"
        )
        raise ConfigError("fault_tolerance.enable", True, want)
    for check in (*SUPPORT_CHECKS, *VALUE_CHECKS, *parts):
        if not (on_paper and check in FILE_CHECKS):
            check(config, world_size, device_type)
