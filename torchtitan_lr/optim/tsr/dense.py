# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""AdamW for the parameters that TSR-Adam does not compress."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from torchtitan_lr.compat.dtensor import local_part, wrap_like
from torchtitan_lr.optim.tsr.sums import local_gradient


class DenseParameters:
    """The parameters that are not compressed, plain or DTensors, with AdamW's moments."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.exp_avg: list[Tensor] = []
        self.exp_avg_sq: list[Tensor] = []
        for parameter in parameters:
            part = local_part(parameter).detach()
            wide = torch.promote_types(part.dtype, torch.float32)
            self.exp_avg.append(torch.zeros_like(part, dtype=wide))
            self.exp_avg_sq.append(torch.zeros_like(part, dtype=wide))

    def state(self, index: int) -> dict[str, Tensor]:
        """Return what a checkpoint holds of a parameter: DTensors of a sharded one, no copies."""
        parameter = self.parameters[index]
        like = (tuple(parameter.shape), {dim: dim for dim in range(parameter.dim())})
        return {
            "exp_avg": wrap_like(parameter, self.exp_avg[index], *like),
            "exp_avg_sq": wrap_like(parameter, self.exp_avg_sq[index], *like),
        }

    def update(self, steps: float, hyper: Mapping[str, Any], found_inf: Tensor | None) -> None:
        """Run AdamW, W ← (1 − ηλ)W − η·m̂/(√v̂ + ε), by torch's fused kernel.

        Weights of a narrower dtype are updated in the moments' dtype, and rounded once.
        ``found_inf`` is 1 on the device if the step is rejected, else 0; None for 0.
        """
        if not self.parameters:
            return
        weights = [local_part(parameter) for parameter in self.parameters]
        exact = [w.to(m.dtype) for w, m in zip(weights, self.exp_avg, strict=True)]
        gradients = [
            local_gradient(parameter).to(m.dtype)
            for parameter, m in zip(self.parameters, self.exp_avg, strict=True)
        ]
        options: dict[str, Any] = {
            name: float(hyper[name]) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")
        }
        # The kernel counts steps on the device; TSR-Adam's counter is on the host.
        counts = torch.full((len(exact),), steps - 1, device=exact[0].device)
        adamw(
            exact,
            gradients,
            self.exp_avg,
            self.exp_avg_sq,
            [],
            list(counts.unbind()),
            fused=True,
            found_inf=found_inf,
            amsgrad=False,
            maximize=False,
            **options,
        )
        for weight, wide in zip(weights, exact, strict=True):
            if weight is not wide:
                weight.copy_(wide)
