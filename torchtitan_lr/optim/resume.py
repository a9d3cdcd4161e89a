# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A resumed run has the hyperparameters of its configuration, not those of the saved state.

Torch's optimizers and schedules save what they were built with (learning rate, decays, the
schedule's base) beside what training has changed (moments, steps), and load both. A resumed run
would then go on with the old values, whatever its configuration says.
"""

from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan_lr.compat.dtensor import local_part


def keep_hyperparameters(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace the hyperparameters of a state to load by this optimizer's.

    It is a hook for `Optimizer.register_load_state_dict_pre_hook`.
    """
    groups = [
        {**own, "params": saved["params"]}
        for own, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    return {**state_dict, "param_groups": groups}


@torch.no_grad()
def copy_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Copy a state into an optimizer's existing tensors; its hyperparameters stay.

    Torch's `Optimizer.load_state_dict` would replace the tensors, and cast them to the dtype of
    their parameter.
    """
    ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(ids, own, strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            local_part(optimizer.state[parameter][name]).copy_(local_part(torch.as_tensor(value)))


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
