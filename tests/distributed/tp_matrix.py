# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The matrix of tensor-parallel cases, and the small part of it that the test suite runs."""

import itertools
from typing import Any

import torch

from tests.distributed.tp_cases import Case
from torchtitan_lr.models.args import Family, LaxGate
from torchtitan_lr.parallel.tensor.tensor_parallel import TPSettings

NORMS: list[dict[str, Any]] = [
    {"norm": "online", "norm_stat": "async"},
    {"norm": "online", "norm_stat": "column"},
    {"norm": "sync"},
]
LOW_RANK: tuple[Family, ...] = ("svd", "cola", "lax")


def strategies() -> list[tuple[Family, LaxGate, dict[str, Any]]]:
    """Every family, kind of LaX gate and choice of settings."""
    found: list[tuple[Family, LaxGate, dict[str, Any]]] = []
    for family, grouping, norm, comm, head in itertools.product(
        LOW_RANK, (True, False), NORMS, ("all_reduce", "sequence"), ("plain", "scatter")
    ):
        settings = {"plan": "btp", "grouping": grouping, **norm, "comm": comm, "head": head}
        found.append((family, "identity", settings))
    for plan, family, grouping in itertools.product(
        ("vanilla", "vanilla_replicated"), LOW_RANK, (True, False)
    ):
        found.append((family, "identity", {"plan": plan, "grouping": grouping}))
    for comm in ("all_reduce", "sequence"):
        found.append(("full", "identity", {"plan": "megatron", "comm": comm}))
    for plan, comm in (("btp", "all_reduce"), ("btp", "sequence"), ("vanilla", "all_reduce")):
        found.append(("lax", "scalar", {"plan": plan, "comm": comm}))
    found.append(("cola", "identity", {"plan": "btp", "loss_parallel": False}))
    return found


def all_cases() -> list[Case]:
    """The whole matrix."""
    dtypes = (torch.float64, torch.float32)
    return [
        Case(family, TPSettings(**settings), gqa, degree, dtype, gate)
        for degree, dtype, gqa in itertools.product((2, 4), dtypes, (False, True))
        for family, gate, settings in strategies()
    ]


def axes(case: Case) -> dict[str, Any]:
    """The case as a point: its value on every axis of the matrix."""
    settings = {name: getattr(case.settings, name) for name in TPSettings.__dataclass_fields__}
    own = {name: getattr(case, name) for name in ("family", "gqa", "degree", "dtype", "gate")}
    return settings | own


def pairs(case: Case) -> set[Any]:
    """Every pair of values of two axes that the case covers."""
    return set(itertools.combinations(axes(case).items(), 2))


def covering(cases: list[Case]) -> list[Case]:
    """A fixed small subset of cases that covers every pair of values which some case has."""
    left = set().union(*(pairs(case) for case in cases))
    chosen = []
    while left:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        chosen.append(best)
    return chosen
