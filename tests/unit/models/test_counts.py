# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Parameters and FLOPs: formulas against the model and the papers' numbers."""

import pytest

from tests.oracle.flops import flops_per_token, head_flops, layer_flops
from tests.oracle.parameters import count_parameters
from tests.unit.tiny import FAMILIES
from torchtitan_lr.models.configured import empty_model
from torchtitan_lr.models.flavors import FLAVORS

# To the parameter: CoLA, Table 5, and Llama 3.1's 8B.
PUBLISHED = {
    "full": {
        **{"60M": 58_073_600, "130M": 134_105_856, "350M": 367_969_280, "1B": 1_339_082_752},
        **{"7B": 6_738_415_616, "8B": 8_030_261_248},
    },
    "cola": {
        **{"60M": 42_770_944, "130M": 93_997_824, "350M": 185_222_144, "1B": 609_310_720},
        "7B": 2_820_935_680,
    },
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_counts(family):
    sizes = PUBLISHED[family]
    assert {size: count_parameters(FLAVORS[family][size]) for size in sizes} == sizes


@pytest.mark.parametrize("flavor", FLAVORS["full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_formulas_equal_what_the_model_counts(family, flavor):
    args = FLAVORS[family][flavor]
    # Blocks are alike (but for LaX's first gates), so two stand for all; 60M has all of its own.
    args.n_layers = args.n_layers if flavor == "60M" else 2
    model = empty_model(args)
    counted = args.get_nparams_and_flops(model, 2048)
    assert counted[0] == sum(p.numel() for p in model.parameters())
    assert counted == (count_parameters(args), flops_per_token(args, 2048))
    # The control: another length costs otherwise.
    assert counted[1] != flops_per_token(args, 2047)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_those_of_the_papers(family):
    """The formulas for multi-head attention and one rank (CoLA, Tables 2 and 3)."""
    args = FLAVORS[family]["350M"]
    n, d, f, r = 256, 1024, 2736, 256
    flops = layer_flops(args, n)
    assert flops.attention_scores == 12 * n * n * d
    linears, feed_forward = 48 * n * d * r, 18 * n * r * (d + f)
    if family == "full":
        linears, feed_forward = 24 * n * d * d, 18 * n * d * f
    assert (flops.attention_linears, flops.feed_forward) == (linears, feed_forward)
    assert head_flops(args, n) == 6 * n * d * 32000
