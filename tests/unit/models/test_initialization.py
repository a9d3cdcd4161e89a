# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Initial weights of one device; that every layout has them is in tests/distributed/test_layout."""

import math

import pytest
import torch

from tests.unit.tiny import FAMILIES, build_tiny


def test_private_rows_start_larger_by_the_root_of_the_lanes():
    wide = {"dim": 64, "ffn_dim": 128}
    ordinary = dict(build_tiny("full", **wide).named_parameters())
    lanes = build_tiny("full", lanes=4, sync_fraction=0.25, **wide)
    scaled = 0
    for name, parameter in lanes.named_parameters():
        expected = ordinary[name].clone()
        if name.endswith((".wo.weight", ".w2.weight")):
            scaled += 1
            expected[int(0.25 * len(expected)) :] *= 2
        assert torch.equal(parameter, expected), name
    assert scaled == 3 * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_gets_its_distribution(family):
    wide = {"dim": 256, "ffn_dim": 512, "vocab_size": 512, "n_kv_heads": 2, "n_layers": 2}
    ranks = {"rank_attention": 64, "rank_ffn": 96} if family != "full" else {}
    gate = {"lax_gate": "scalar"} if family == "lax" else {}
    model = build_tiny(family, **wide, **ranks, **gate)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(".gate"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        std = 0.02
        if name.endswith((".A.weight", ".B.weight")):
            rank = 64 if "attention" in name else 96
            d_out = (
                512 if "feed_forward" in name else 128 if ".wk" in name or ".wv" in name else 256
            )
            std = rank**-0.25 * (256 + d_out) ** -0.25
        assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name
        assert parameter.std().item() == pytest.approx(std, rel=0.03), name


def test_model_is_reproducible_whatever_was_drawn_before():
    torch.manual_seed(5)
    one = build_tiny("lax").state_dict()
    torch.randn(100)
    two = build_tiny("lax").state_dict()
    other = build_tiny("lax", init_seed=1).state_dict()
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert not any(torch.equal(one[k], other[k]) for k in one if "norm" not in k)
