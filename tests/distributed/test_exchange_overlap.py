# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Compressed exchanges beside backward: their own process group, and what goes on meanwhile."""

from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.compression_cases import CASES, Weighted, compress, layout, step_gradients
from tests.support.rank_pool import RankPool
from torchtitan_lr.compat.process_groups import second_group
from torchtitan_lr.compression.codecs import SketchCodec
from torchtitan_lr.ledger.ledger import identify
from torchtitan_lr.parallel.data_parallel import sum_gradients

UNITS = 4


class Calls(TorchDispatchMode):
    """Notes every collective with the name of its group, not that of the mesh dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with patch("torchtitan_lr.compat.process_groups._FIRST_NAMES", {}):
            call = identify(func, args, kwargs or {})
        if call is not None:
            self.seen.append((call.op, call.group))
        return func(*args, **(kwargs or {}))


def order_of_a_step() -> list[tuple[str, str]]:
    """The collectives of one backward, each with its group, and each decode among them."""
    case = CASES["sketch"]
    mesh = layout(False)["fsdp"]
    torch.manual_seed(0)
    model = nn.Sequential(*(Weighted() for _ in range(UNITS)))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    sum_gradients(model)
    compress(model, mesh, case)
    step_gradients(model, case, 0)
    model.zero_grad()
    decode, calls = SketchCodec.decode, Calls()

    def noted(*args: Any) -> Any:
        calls.seen.append(("decode", ""))
        return decode(*args)

    with patch.object(SketchCodec, "decode", noted), calls:
        loss = model(torch.zeros(2, requires_grad=True)).sum()
        calls.seen.clear()  # those of forward
        loss.backward()
    group = mesh.get_group()
    names = {group.group_name: "weights", second_group(group).group_name: "exchange", "": ""}
    return [(op, names[group]) for op, group in calls.seen]


def places(calls: list[tuple[str, str]], wanted: tuple[str, str]) -> list[int]:
    return [i for i, call in enumerate(calls) if call == wanted]


def test_next_weights_are_gathered_before_the_decode(four_ranks: RankPool) -> None:
    calls, *others = four_ranks.run(order_of_a_step)
    assert others == [calls] * 3
    starts, decodes = places(calls, ("all_to_all", "exchange")), places(calls, ("decode", ""))
    gathers = places(calls, ("all_gather", "weights"))
    assert len(starts) == len(decodes) == UNITS and len(gathers) == UNITS
    for start, decode in list(zip(starts, decodes, strict=True))[: UNITS - 2]:
        assert any(start < gather < decode for gather in gathers)
    # One exchange is under way at a time.
    assert all(decode < start for decode, start in zip(decodes, starts[1:], strict=False))


def test_each_group_has_its_own_calls(four_ranks: RankPool) -> None:
    calls = four_ranks.run(order_of_a_step)[0]
    assert {op for op, group in calls if group == "weights"} == {"all_gather"}
    counts = {op: calls.count((op, "exchange")) for op, group in calls if group == "exchange"}
    assert counts == dict.fromkeys(("all_to_all", "reduce_scatter", "all_gather"), UNITS)
