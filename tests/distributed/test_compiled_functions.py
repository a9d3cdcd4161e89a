# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every autograd Function of the plans has the same gradients compiled as not.

Torch 2.11's compiler silently drops the gradient of a Function whose forward ends in an operator
that returns its own argument (a wait, a cast to the dtype at hand).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.parity_cases import tp_mesh
from tests.support.rank_pool import RankPool
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.parallel import edge
from torchtitan_lr.parallel.btp import (
    Reduction,
    down_projections,
    online_down,
    sync_norm,
    up_projections,
)
from torchtitan_lr.parallel.megatron import column_parallel

B, S, D, R = 1, 8, 16, 4


def functions(ranks: Ranks) -> dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]]:
    """What is compiled, and the shapes of its inputs."""
    pair: list[tuple[int, ...]] = [(R, D), (R, D)]
    table: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
        "copy": (lambda x: edge.copy_to_ranks(x, ranks), [(B, S, D)]),
        "reduce": (lambda x: edge.reduce_from_ranks(x, ranks), [(B, S, D)]),
        "down": (lambda x, *w: down_projections(x, w, Reduction(ranks)), [(B, S, D), *pair]),
        "column": (lambda x, *w: column_parallel(x, w, ranks), [(B, S, D), *pair]),
        "column_tokens": (lambda x, *w: column_parallel(x, w, ranks, 1), [(B, S, D), *pair]),
        "up": (
            lambda x, *w: up_projections(x.split(R, -1), w, ranks),
            [(B, S, 3 * R), (2 * D, R), (D, R), (D, R)],
        ),
        "sync": (lambda x, g: sync_norm(x, g, 2 * D, 0.1, ranks), [(B, S, D), (D,)]),
    }
    for name in (
        "gather_and_copy_to_ranks",
        "gather_from_ranks",
        "reduce_scatter_to_ranks",
        "scatter_to_ranks",
    ):
        function = getattr(edge, name)
        table[name] = (lambda x, f=function: f(x, ranks, 1), [(B, S, D)])
    for name, choice in {
        "async": {},
        "ungrouped": {"grouping": False},
        "sequence": {"sequence": True},
    }.items():
        how = Reduction(ranks, **choice)
        down = lambda x, g, *w, how=how: online_down(x, g, 2 * D, 0.1, w, how)  # noqa: E731
        table[f"online_{name}"] = (down, [(B, S, D), (D,), *pair])
    return table


def worst_errors() -> dict[str, float]:
    """Largest relative difference of any gradient by Function; on a rank."""
    errors = {}
    for name, (function, shapes) in functions(Ranks.of(tp_mesh(2))).items():
        torch.manual_seed(torch.distributed.get_rank())
        inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        pairs = zip(_gradients(compiled, inputs), _gradients(function, inputs), strict=True)
        errors[name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return errors


def _gradients(function: Callable[..., Any], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    # Not the inputs themselves: a compiled block's tensors are made inside.
    out = function(inputs[0] * 1.5, *inputs[1:])
    outputs = [out] if isinstance(out, Tensor) else list(out)
    total = torch.stack([(y.square() * (y.detach() + 2)).sum() for y in outputs]).sum()
    return torch.autograd.grad(total, inputs)


@pytest.mark.nightly  # where torch 2.11 is tested too
def test_compiled_gradients(two_ranks: RankPool) -> None:
    for errors in two_ranks.run(worst_errors):
        assert len(errors) == 14
        assert max(errors.values()) < 1e-12, errors
