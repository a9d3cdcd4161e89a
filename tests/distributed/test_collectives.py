# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every collective is the derivative-true form of what all ranks compute together."""

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.parity_cases import tp_mesh
from tests.support.rank_pool import RankPool
from torchtitan_lr.collectives import Ranks
from torchtitan_lr.compat.process_groups import second_group, set_timeouts
from torchtitan_lr.parallel import paired

SHAPE = (4, 8, 4)

# Whether x is the same on every rank, and what all ranks' outputs are, given all ranks' inputs.
MEANING: dict[str, tuple[bool, Callable[[list[Tensor], int], list[Tensor]]]] = {
    "copy_to_ranks": (True, lambda xs, dim: xs),
    "reduce_from_ranks": (False, lambda xs, dim: [sum(xs)]),  # type: ignore[list-item]
    "gather_and_copy_to_ranks": (False, lambda xs, dim: [torch.cat(xs, dim)] * len(xs)),
    "gather_from_ranks": (False, lambda xs, dim: [torch.cat(xs, dim)]),
    "reduce_scatter_to_ranks": (False, lambda xs, dim: list(sum(xs).chunk(len(xs), dim))),  # type: ignore
    "scatter_to_ranks": (
        True,
        lambda xs, dim: [x.chunk(len(xs), dim)[rank] for rank, x in enumerate(xs)],
    ),
}


def draws(n: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> list[Tensor]:
    """Small integers: sums of them are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-4, 5, shape, generator=generator).to(dtype) for _ in range(n)]


def derivative_error(name: str, dim: int, size: int, dtype: torch.dtype) -> float:
    """Run a collective; differentiate its meaning: one tensor of all ranks, or one per rank."""
    ranks = Ranks.of(tp_mesh(size))
    replicated, outputs_of = MEANING[name]
    xs = draws(size, SHAPE, 0, dtype)
    xs = [x.clone().requires_grad_() for x in ([xs[0]] * size if replicated else xs)]
    outputs = outputs_of(xs, dim)
    weights = draws(len(outputs), tuple(outputs[0].shape), 1, dtype)
    expected = torch.autograd.grad(
        sum((out * w).sum() for out, w in zip(outputs, weights, strict=True)), xs
    )
    gradient = sum(expected) if replicated else expected[ranks.rank]

    function = getattr(paired, name)
    if name not in ("copy_to_ranks", "reduce_from_ranks"):
        function = partial(function, dim=dim)
    # A transposed input: nothing may rely on contiguity.
    x = xs[ranks.rank].detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    y = function(x, ranks)
    index = ranks.rank if len(outputs) > 1 else 0
    if not torch.equal(y, outputs[index]):
        return float("inf")
    y.backward(weights[index])
    return (x.grad - gradient).abs().max().item()  # type: ignore[operator]


@pytest.mark.parametrize("name", MEANING)
def test_forward_and_backward(name: str, four_ranks: RankPool) -> None:
    errors = []
    for dim, size, dtype in ((0, 4, torch.float64), (1, 4, torch.bfloat16), (-1, 2, torch.float32)):
        errors += four_ranks.run(derivative_error, name, dim, size, dtype)
    assert len(errors) == 12
    assert max(errors) == 0.0


def waited_for_a_hung_rank(seconds: float) -> float:
    """Rank 1 does not answer in a second group; how long rank 0 waits for it."""
    second = second_group(dist.new_group())
    set_timeouts(timedelta(seconds=seconds))
    started = time.perf_counter()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1), group=second)
    waited = time.perf_counter() - started
    set_timeouts(timedelta(minutes=30))  # of the pool's other groups
    dist.barrier()
    return waited


def test_a_hung_rank_is_noticed_in_a_second_group(two_ranks: RankPool) -> None:
    waited = two_ranks.run(waited_for_a_hung_rank, 1.0)
    assert 0.9 < waited[0] < 10 and waited[1] < 1
