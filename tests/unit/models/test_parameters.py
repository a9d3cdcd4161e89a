# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import dataclasses

import pytest
import torch

from tests.oracle.parameters import count_parameters
from tests.unit.tiny import tiny_args
from torchtitan_lr.models.families import FAMILIES
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel

# CoLA, Table 5, to the parameter: flavor -> (full rank, CoLA).
PUBLISHED = {
    "60M": (58_073_600, 42_770_944),
    "130M": (134_105_856, 93_997_824),
    "350M": (367_969_280, 185_222_144),
    "1B": (1_339_082_752, 609_310_720),
    "7B": (6_738_415_616, 2_820_935_680),
}


def build_on_meta(args):
    with torch.device("meta"):
        return LlamaModel(args)


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_published_counts(flavor):
    counts = tuple(count_parameters(FLAVORS[family][flavor]).total for family in ("full", "cola"))
    assert counts == PUBLISHED[flavor]


def test_llama_3_8b_has_its_published_size():
    assert count_parameters(FLAVORS["full"]["8B"]).total == 8_030_261_248


@pytest.mark.parametrize("flavor", FLAVORS["full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_formula_equals_model(family, flavor):
    args = FLAVORS[family][flavor]
    # Blocks are alike (but for LaX's first gates), so two stand for all; 60M has all of its own.
    if flavor != "60M":
        args.n_layers = 2
    model = build_on_meta(args)
    assert count_parameters(args).total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("n_kv_heads", [None, 2, 1])
@pytest.mark.parametrize("family", [*FAMILIES, "gated"])
def test_parts_equal_model(family, n_kv_heads):
    gate = {"lax_gate": "scalar"} if family == "gated" else {}
    args = tiny_args("lax" if gate else family, n_kv_heads=n_kv_heads, rank_attention=9, **gate)
    parts = dict.fromkeys(("embedding", "attention", "feed_forward", "norms", "gates", "head"), 0)
    for name, parameter in build_on_meta(args).named_parameters():
        if name.endswith(".gate"):
            part = "gates"
        elif "norm" in name:
            part = "norms"
        elif ".attention." in name:
            part = "attention"
        elif ".feed_forward." in name:
            part = "feed_forward"
        else:
            part = {"tok_embeddings.weight": "embedding", "output.weight": "head"}[name]
        parts[part] += parameter.numel()
    assert dataclasses.asdict(count_parameters(args)) == parts
    assert (parts["gates"] > 0) == bool(gate)
