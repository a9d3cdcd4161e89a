# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The check of a whole configuration, which raises one-line errors.

It needs no process group: one process of a run calls it (`torchtitan_lr.launch.verdict`).
"""

from collections.abc import Callable
from typing import Any

from torchtitan_lr.checks import compression, pipeline, stored, support, values
from torchtitan_lr.config.build import extension_of
from torchtitan_lr.errors import ConfigError

# What reads data or builds models comes last.
_CHECKS: tuple[Callable[[Any, int, str], None], ...] = (
    *(support.check_parallelism, support.check_compile, support.check_cpu),
    *(values.check_training, values.check_dump_folder, values.check_checkpoint),
    *(values.check_model, values.check_vocabulary, stored.check_stored_model, values.check_data),
    *(support.check_tensor_parallel, pipeline.check_pipeline, support.check_tsr),
    *(compression.check_grad_compression, stored.check_stored_data),
)

_OF_FILES = {
    *(values.check_dump_folder, values.check_checkpoint, values.check_vocabulary),
    *(values.check_data, stored.check_stored_model, stored.check_stored_data),
}


def check_job_config(
    config: Any, world_size: int, device_type: str, on_paper: bool = False
) -> None:
    """Raise for a configuration that cannot run.

    Args:
        config: The result of :func:`build_job_config`.
        world_size: Number of ranks of the whole run.
        device_type: ``cpu``, ``cuda`` or ``xpu``: the device of the ranks.
        on_paper: Whether to skip the checks of files on this machine, for an estimate.

    Raises:
        ConfigError: With the first invalid key.
    """
    if not on_paper:
        stored.check_record(config, world_size)  # first, since it takes no time
    if (extension := extension_of(config)) is not None:
        extension.check(config, world_size, device_type)
    elif config.fault_tolerance.enable:
        module = "torchtitan_lr.experiments.replicas.job_config"
        want = f"false, or job.custom_config_module = '{module}'"
        raise ConfigError("fault_tolerance.enable", True, want)
    for check in _CHECKS:
        if not (on_paper and check in _OF_FILES):
            check(config, world_size, device_type)
