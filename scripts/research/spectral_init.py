# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Spectral init: B A is the best rank-r approximation of a new `torch.nn.Linear`'s weight.

W = U S Vᵀ is Kaiming-uniform; B = U_r √S_r, A = √S_r V_rᵀ (https://github.com/da462/spectron). A
run names this module by ``experimental.custom_import``; the values of ``optimizer.name`` that it
adds draw the factors so before the first step. On one process.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchtitan_lr.compat.dtensor import local_part
from torchtitan_lr.models.linears import LowRankLinear
from torchtitan_lr.optim.entries import build_optimizers, register_optimizer, variant
from torchtitan_lr.titan.base import OptimizerConfig, ParallelDims
from torchtitan_lr.titan.components import OptimizersContainer

SUFFIX = "-spectral-init"


@torch.no_grad()
def draw_factors(linear: LowRankLinear, generator: torch.Generator) -> None:
    """Draw the factors of one linear."""
    a, b = local_part(linear.A.weight), local_part(linear.B.weight)  # (r, d_in), (d_out, r)
    (rank, d_in), d_out = a.shape, b.shape[0]
    weight = torch.empty(d_out, d_in)
    nn.init.kaiming_uniform_(weight, a=5**0.5, generator=generator)
    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    roots = s[:rank].sqrt()
    b.copy_(u[:, :rank] * roots)
    a.copy_(roots[:, None] * vt[:rank])


def build(
    model_parts: list[nn.Module], config: OptimizerConfig, dims: ParallelDims
) -> OptimizersContainer:
    """Draw the factors of all linears, then build the optimizer that the name begins with."""
    (model,) = model_parts
    args: Any = model.model_args
    generator = torch.Generator().manual_seed(args.init_seed)
    for module in model.modules():
        if isinstance(module, LowRankLinear):
            draw_factors(module, generator)
    base = replace(config, name=config.name.removesuffix(SUFFIX))
    found: OptimizersContainer = build_optimizers(model_parts, base, dims)
    return found


for name in ("AdamW", "Spectron", "Muon"):
    register_optimizer(variant(name, name + SUFFIX, build))
