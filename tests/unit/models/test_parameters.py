# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.

import pytest
import torch

from tests.oracle.parameters import count_parameters
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
