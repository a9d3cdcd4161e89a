# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A resumed run has the hyperparameters of its configuration, not those of the saved state.

Torch's optimizers and schedules save what they were built with (learning rate, decays, the
schedule's base) beside what training has changed (moments, steps), and load both. A resumed run
would then go on with the old values, whatever its configuration says.
"""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def keep_hyperparameters(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace the hyperparameters of a state to load by this optimizer's.

    It is a hook for `Optimizer.register_load_state_dict_pre_hook`.
    """
    groups = [
        {**own, "params": saved["params"]}
        for own, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    return {**state_dict, "param_groups": groups}


class ConfiguredLR(LambdaLR):
    """`LambdaLR` that loads only the step of a saved schedule.

    The rate of the first resumed step is then the configured schedule's at that step.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the step of a saved schedule."""
        step = state_dict["last_epoch"]
        rates = [base * f(step) for base, f in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        counted = {"last_epoch": step, "_step_count": state_dict["_step_count"]}
        super().load_state_dict(self.state_dict() | counted | {"_last_lr": rates})
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
