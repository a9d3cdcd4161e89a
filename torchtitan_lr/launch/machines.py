# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The machines of a run: how many there may be, and how often their ranks restart.

``NNODES=4`` waits for four machines. ``NNODES=2:4`` starts with two to four and goes on with fewer
when one is lost, as long as two are left. ``MAX_RESTARTS`` is how often the ranks of a machine are
started again after one has failed. torchrun counts and restarts; a restarted rank resumes from the
last complete checkpoint, as after any other interruption.
"""

from typing import Any

from torchtitan_lr.checks.job import Data, check_job_config
from torchtitan_lr.errors import ConfigError, require
from torchtitan_lr.launch.environment import Environment

_BATCH = "training.global_batch_size"


def check_machines(
    config: Any, environment: Environment, device_type: str, data: Data = "prepare"
) -> None:
    """Check the configuration for every number of machines that the run may have.

    The launchers of several machines read no file: rank 0 does, for all (`launch.check_once`).

    Raises:
        ConfigError: The configuration cannot run, cannot be restarted, or does not fit one of the
            numbers of machines.
    """
    restarts = environment.max_restarts
    for key, value in (("enable", True), ("load_only", False), ("load_step", -1)) * bool(restarts):
        want = f"{str(value).lower()} with MAX_RESTARTS={restarts}: a restart resumes"
        got = getattr(config.checkpoint, key)
        require(got == value, f"checkpoint.{key}", got, f"{want} from the newest checkpoint")
    on_paper = environment.nodes > 1
    check_job_config(config, environment.world_size, device_type, on_paper, data)
    if environment.min_nodes is None:
        return
    if config.training.global_batch_size == -1:
        want = f"a number with NNODES={environment.nodes_text}: -1 depends on the machines"
        raise ConfigError(_BATCH, -1, want)
    codec = config.grad_compression.codec
    if codec != "none":
        # Only the number of ranks that saved residuals can load them.
        want = f"none with NNODES={environment.nodes_text}, as residuals belong to ranks"
        raise ConfigError("grad_compression.codec", codec, want)
    for nodes in range(environment.nodes - 1, environment.min_nodes - 1, -1):
        try:
            check_job_config(config, environment.ranks * nodes, device_type, on_paper)
        except ConfigError as error:
            want = f"only numbers of machines that fit; {nodes} of {environment.ranks} ranks: "
            raise ConfigError("NNODES", environment.nodes_text, f"{want}{error}") from error
