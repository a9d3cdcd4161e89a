# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What tests alone do with a tensor-parallel case: wrappers, some steps."""

from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tests.support import parity_cases
from tests.support.parity_cases import (
    Case,
    build_model,
    compile_named,
    parity,
    relative,
    run_model,
    shard_model,
    tp_mesh,
)
from torchtitan_lr.models.llama import LlamaModel


def compile_last_block(model: LlamaModel, case: Case) -> None:
    """The one that receives LaX's latents; two of them would cost twice as much."""
    compile_named(model, list(model.layers)[-1:])


def fully_shard_blocks(model: LlamaModel, case: Case) -> None:
    """FSDP2 over the replicas, all of which see the same data: gradients are averaged."""
    mesh = tp_mesh(case.degree)._get_root_mesh()["dp"]
    units: list[Any] = [model.tok_embeddings, *model.layers.values()]
    for unit in (*units, [model.norm, model.output], model):
        fully_shard(unit, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(float(mesh.size()))


def parities(cases: list[Case]) -> list[dict[str, float]]:
    return [parity(case) for case in cases]


def train_steps(model: LlamaModel, steps: int = 5) -> tuple[list[float], LlamaModel]:
    """AdamW with clipping on fixed tokens; the gradient norms, and the model."""
    # With Adam's usual ε, 1e-8, entries next to nothing would enlarge the rounding.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        run_model(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
    return norms, model


def wrapped_parity(case: Case, names: list[str], backend: str) -> dict[str, float]:
    replica = tp_mesh(case.degree)._get_root_mesh().get_local_rank("dp")
    if replica and "fully_shard_blocks" not in names:
        return {}  # it would compile and compute the same as the first one
    known = vars(parity_cases) | globals()
    with patch.object(parity_cases, "BACKEND", backend):
        return parity(case, *(known[name] for name in names))


def worst(results: list[dict[str, float]]) -> float:
    results = [errors for errors in results if errors]
    assert results and all(len(errors) > 10 for errors in results)
    return max(max(errors.values()) for errors in results)


def five_steps(case: Case) -> tuple[list[float], dict[str, float]]:
    """Relative errors of gradient norms and of parameters after AdamW with clipping; on a rank."""
    norms, model = train_steps(build_model(case, shard_model(case)))
    expected_norms, expected = train_steps(build_model(case))
    moved = dict(build_model(case).named_parameters())
    errors = {}
    for (name, value), (_, exact) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert isinstance(value, DTensor)
        assert relative(exact.detach(), moved[name].detach()) > 1e-4  # training did something
        errors[name] = relative(value.full_tensor().detach(), exact.detach())
    return [abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True)], errors
