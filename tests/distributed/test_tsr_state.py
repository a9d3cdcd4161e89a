# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TSR-Adam's state through DCP: the same layout goes on bitwise, another within rounding (fp64)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.distributed.tsr_cases import (
    BASE,
    DEFAULTS,
    STEPS,
    Case,
    build_model,
    full,
    place,
    relative,
    take_step,
    train,
    twin,
)
from tests.support.nightly import nightly
from tests.support.rank_pool import RankPool
from torchtitan_lr.optim.tsr.container import TSROptimizers

SAVED = 4
"""Steps before the checkpoint: between two refreshes."""

PAIRS = [
    ("hsdp2x2", "tp2xdp2"),
    ("tp2xdp2", "fsdp4"),
    ("fsdp2xtp2", "replicate4"),
    ("fsdp4", "fsdp2xtp2"),
    ("replicate4", "pp2xdp2"),
    ("pp2xdp2", "hsdp2x2"),
]


def states(model: Any, optimizer: TSROptimizers) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save(case: Case, folder: str) -> dict[str, torch.Tensor]:
    """Save after some steps, then go on; return what the uninterrupted run ends with."""
    layout = place(case.layout)
    model, optimizer, _ = train(case, layout, steps=SAVED)
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    for step in range(SAVED, STEPS):
        take_step(model, optimizer, layout, case, step)
    return {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def resume(case: Case, folder: str) -> dict[str, torch.Tensor]:
    layout = place(case.layout)
    model = build_model(layout, case.dtype)
    optimizer = TSROptimizers(
        [model], case.settings, DEFAULTS, replicas=layout.replicas, stages=layout.stages
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = states(model, optimizer)
    dcp.load(loaded, checkpoint_id=folder)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    for step in range(SAVED, STEPS):
        take_step(model, optimizer, layout, case, step)
    return {name: full(p.detach()).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", [*nightly("hsdp2x2"), "fsdp2xtp2", "pp2xdp2"])
def test_the_same_layout_goes_on_bitwise(layout: str, four_ranks: RankPool, tmp_path: Any) -> None:
    case = Case(layout, replace(BASE, stagger=True))
    undisturbed = four_ranks.run(save, case, str(tmp_path))
    resumed = four_ranks.run(resume, case, str(tmp_path))
    for expected, found in zip(undisturbed, resumed, strict=True):
        assert expected.keys() == found.keys()
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), name


@pytest.mark.parametrize(
    ("projection", "before", "after"),
    [
        *(("two_sided", *pair) for pair in PAIRS[::2]),
        ("one_sided", *PAIRS[1]),
        *nightly(*(("two_sided", *pair) for pair in PAIRS[1::2])),
        *nightly(*(("one_sided", *pair) for pair in PAIRS[:3:2])),
    ],
)
def test_another_layout_goes_on(
    projection: Any, before: str, after: str, four_ranks: RankPool, tmp_path: Any
) -> None:
    settings = replace(BASE, projection=projection)
    expected, _ = twin(Case("alone", settings))
    four_ranks.run(save, Case(before, settings), str(tmp_path))
    for found in four_ranks.run(resume, Case(after, settings), str(tmp_path)):
        assert all(relative(weight, expected[name]) < 1e-9 for name, weight in found.items())
