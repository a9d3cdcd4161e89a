# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Gradient compression under FSDP2 and HSDP on four ranks.

Gradients here are whole numbers, whose sums are exact in fp32: what equals, equals in every bit.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.compression_cases import CASES, SHAPES, Case, build, gradient, step_gradients
from tests.support.rank_pool import RankPool
from torchtitan_lr.compression.units import COMPRESSORS, compressors_of


def true_sum(name: str, case: Case, step: int) -> Tensor:
    index, _, tensor = name.partition(".")
    parts = [
        2 * gradient(tensor, int(index), rank, step, micro)
        for rank in range(4)
        for micro in range(case.microbatches)
    ]
    return torch.stack(parts).sum(0)


def owed_by_name(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """Sum residuals over all ranks and cut them into the full parameters' shapes.

    FSDP cuts a tensor along its first dimension into W equal parts, the last ones padded.
    """
    owed = {}
    for index, unit in enumerate(model):
        compressor = COMPRESSORS.get(unit)
        if case.hsdp:
            flat = compressor.residual.flatten()[: compressor.compressed_size]
            shards = [torch.zeros_like(flat) for _ in range(4)]
            dist.all_gather(shards, flat)
            # Ranks (replica, shard): 0 and 2 hold the same shard.
            rows = torch.stack([shards[0] + shards[2], shards[1] + shards[3]])
        else:
            rows = compressor.residual.clone()
            dist.all_reduce(rows)
        start = 0
        for name, shape in SHAPES.items():
            size = torch.Size(shape).numel()
            if size < case.min_size:
                owed[f"{index}.{name}"] = torch.zeros(shape)
                continue
            per_row = -(-shape[0] // len(rows)) * (size // shape[0])
            cut = rows[:, start : start + per_row].reshape(-1, *shape[1:])
            owed[f"{index}.{name}"] = cut[: shape[0]]
            start += per_row
        assert start == compressor.compressed_size
    return owed


def books(case: Case, steps: int = 3) -> dict[str, Any]:
    """Largest |sent + owed after − owed before − gradient| of every step, and what was owed."""
    model, _ = build(case)
    before = owed_by_name(model, case)
    errors, owed = [], []
    for step in range(steps):
        sent = step_gradients(model, case, step)
        after = owed_by_name(model, case)
        differences = [
            (sent[n] + after[n] - before[n] - true_sum(n, case, step)).abs().max()
            for n in sent
            # What is not compressed has no residual for what bf16 rounds off.
            if not case.codec.half or sent[n].numel() >= case.min_size
        ]
        errors.append(float(max(differences)))
        owed.append(float(max(value.abs().max() for value in after.values())))
        before = after
    exchanges = [compressor.exchanges for compressor in compressors_of([model])]
    return {"errors": errors, "owed": owed, "exchanges": exchanges}


def books_of_all() -> dict[str, dict[str, Any]]:
    return {name: books(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def all_books(four_ranks: RankPool) -> list[dict[str, dict[str, Any]]]:
    return four_ranks.run(books_of_all)


@pytest.mark.parametrize("name", CASES)
def test_sent_and_residual_are_the_gradient_exactly(
    name: str, all_books: list[dict[str, dict[str, Any]]]
) -> None:
    for result in (rank[name] for rank in all_books):
        assert result["errors"] == [0.0] * 3
        assert min(result["owed"]) > 100
        assert result["exchanges"] == [3, 3]


def after_a_nan(case: Case) -> tuple[bool, bool, float]:
    """Run a step, then one in which rank 1's loss is NaN: what was sent, owed, and still owed."""
    model, _ = build(case)
    step_gradients(model, case, 0)
    before = [compressor.residual.clone() for compressor in compressors_of([model])]
    weight = float("nan") if dist.get_rank() == 1 else 0.0
    for unit in model:
        unit.gradients = {name: torch.ones(shape) * weight for name, shape in SHAPES.items()}
    model.zero_grad()
    model(torch.zeros(2, requires_grad=True)).sum().backward()
    sent = all(p.grad.full_tensor().isfinite().all() for p in model.parameters())
    owed = [compressor.residual for compressor in compressors_of([model])]
    kept = [(a == b).float().mean() for a, b in zip(owed, before, strict=True)]
    return sent, all(bool(x.isfinite().all()) for x in owed), float(min(kept))


@pytest.mark.parametrize("name", ["sparse", "sketch_10x", "sketch_half", "sketch_hsdp"])
def test_a_nan_is_sent_and_leaves_the_residual_as_it_was(name: str, four_ranks: RankPool) -> None:
    for sent_is_finite, owed_is_finite, kept in four_ranks.run(after_a_nan, CASES[name]):
        assert not sent_is_finite and owed_is_finite and kept > 0.85
