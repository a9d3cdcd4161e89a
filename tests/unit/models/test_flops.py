# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.oracle.flops import flops_per_sequence, flops_per_token, head_flops, layer_flops
from tests.oracle.parameters import count_parameters
from tests.unit.tiny import FAMILIES, build_tiny, tokens
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.models.llama import LlamaModel

CASES = [("full", "fullrank", heads) for heads in (None, 2)]
CASES += [
    ("svd", "fullrank", 2),
    ("lax", "both", 2),
    ("cola", "both", None),
    ("cola", "reduced", 1),
]


def count(model, b, s):
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        model(tokens(model.model_args, b, s)).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("family", "activation", "n_kv_heads"), CASES)
def test_formula_equals_the_counter(family, activation, n_kv_heads):
    model = build_tiny(family, activation=activation, n_kv_heads=n_kv_heads, n_layers=2)
    b, s = 2, 24
    assert count(model, b, s) == b * flops_per_sequence(model.model_args, s)


@pytest.mark.parametrize("flavor", FLAVORS["full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_formula_equals_what_the_model_counts_for_the_mfu(family, flavor):
    args = FLAVORS[family][flavor]
    args.n_layers = 2  # blocks cost alike
    with torch.device("meta"):
        model = LlamaModel(args)
    counted = args.get_nparams_and_flops(model, 2048)
    assert counted == (count_parameters(args).total, flops_per_token(args, 2048))
    # Negative control: neither another length nor another depth costs the same.
    assert counted[1] != flops_per_token(args, 2047)
    args.n_layers = 3
    assert counted != (count_parameters(args).total, flops_per_token(args, 2048))


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_those_of_the_papers(family):
    """The formulas for multi-head attention and one rank (CoLA, Tables 2 and 3)."""
    args = FLAVORS[family]["350M"]
    n, d, f, r = 256, 1024, 2736, 256
    flops = layer_flops(args, n)
    assert flops.attention_scores == 12 * n * n * d
    if family == "full":
        assert flops.attention_linears == 24 * n * d * d
        assert flops.feed_forward == 18 * n * d * f
    else:
        assert flops.attention_linears == 48 * n * d * r
        assert flops.feed_forward == 18 * n * r * (d + f)
    assert head_flops(args, n) == 6 * n * d * 32000
    assert flops_per_token(args, n) * n == flops_per_sequence(args, n)
