# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The formulas of context parallelism against numbers that are known without them."""

from dataclasses import replace

import pytest

from torchtitan_lr.costs.context_messages import context_traffic, latent_flops
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.plan_parts import TPSettings

BTP = TPSettings("btp")
ROW = 131_072
C = 8


@pytest.mark.parametrize(("flavor", "tp", "less"), [("7B", 1, 4), ("7B", 2, 2), ("8B", 1, 1)])
def test_latents_send_d_kv_over_t_r_times_less(flavor, tp, less):
    args = FLAVORS["cola"][flavor]
    found = {g: context_traffic(args, BTP, tp, C, ROW // C, g) for g in ("kv", "latents")}
    for kv, latents in zip(found["kv"], found["latents"], strict=True):
        assert replace(kv, elements=0) == replace(latents, elements=0)
        assert kv.elements == less * latents.elements
    # One gather forward; in backward another one and a reduce-scatter; k and v in one.
    assert len(found["kv"]) == 3 * args.n_layers
    assert {(row.pass_, row.op, row.calls) for row in found["kv"]} == {
        *(("forward", "all_gather", 1), ("backward", "all_gather", 1)),
        ("backward", "reduce_scatter", 1),
    }
    assert context_traffic(args, BTP, tp, 1, ROW, "kv") == []


def test_flops_of_latents():
    """B is a (d_kv/T, r) product per token, twice: of k and of v."""
    args, n = FLAVORS["cola"]["7B"], 16
    product = 2 * 2048 * 1024  # FLOPs per token at T = 2
    forward = 2 * product * n * (C - 1)
    again = 2 * product * n * C
    assert latent_flops(args, BTP, 2, C, n) == (forward, 2 * forward + again)
