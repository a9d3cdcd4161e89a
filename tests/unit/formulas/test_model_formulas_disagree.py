# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Stage boundaries, parameters and FLOPs are broken on purpose: the formulas must disagree."""

from dataclasses import replace

import pytest
import torch

from tests.unit.tiny import FAMILIES, tiny_args
from torchtitan_lr.formulas.flops import flops_per_token
from torchtitan_lr.formulas.parameters import count_parameters
from torchtitan_lr.formulas.pipeline import boundary_elements
from torchtitan_lr.models.llama import LlamaModel
from torchtitan_lr.parallel.pipeline import boundaries
from torchtitan_lr.parallel.tensor.plans import TPSettings

PLANS = [
    ("cola", TPSettings("auto"), 1),
    ("lax", TPSettings("auto"), 1),
    *(("svd", TPSettings("btp", comm=comm), 4) for comm in ("all_reduce", "sequence")),
    *(("lax", TPSettings("btp", comm=comm), 4) for comm in ("all_reduce", "sequence")),
    ("lax", TPSettings("vanilla"), 4),
    ("lax", TPSettings("vanilla_replicated"), 2),
    *(("full", TPSettings("megatron", comm=comm), 4) for comm in ("all_reduce", "sequence")),
    ("lanes", TPSettings("caat"), 2),
    ("lanes", TPSettings("auto"), 1),
    ("low-rank lanes", TPSettings("btp_caat"), 4),
]


def unequal_boundaries():
    lanes = {"lanes": 4, "sync_fraction": 0.5}
    args = {family: tiny_args(family) for family in FAMILIES}
    args |= {"lanes": tiny_args("full", **lanes), "low-rank lanes": tiny_args("svd", **lanes)}
    return [
        (kind, settings)
        for kind, settings, degree in PLANS
        for before in (0, 1, 3)
        if boundaries.stage_boundary(
            args[kind], settings, degree, 16, latents=0 < before < 3
        ).elements
        != boundary_elements(args[kind], settings, degree, 16, before)
    ]


@pytest.mark.parametrize("part", ["rows", "stream", "latents"])
def test_a_wrong_boundary_is_noticed(part, monkeypatch):
    right = boundaries.stage_boundary
    assert unequal_boundaries() == []

    def wrong(*args, **kwargs):
        found = right(*args, **kwargs)
        more = {"rows": found.rows + 1, "stream": found.stream + 1, "latents": (*found.latents, 1)}
        return replace(found, **{part: more[part]})

    monkeypatch.setattr(boundaries, "stage_boundary", wrong)
    assert len(unequal_boundaries()) == 3 * len(PLANS)


RIGHT = LlamaModel.flops_per_token


def model_and_formulas(family, **changes):
    args = tiny_args(family, **changes)
    with torch.device("meta"):
        model = LlamaModel(args)
    return model, (count_parameters(args).total, flops_per_token(args, 16))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_size_or_cost_of_the_model_is_noticed(family, monkeypatch):
    model, expected = model_and_formulas(family, n_kv_heads=2)
    counted = model.model_args.get_nparams_and_flops(model, 16)
    assert counted == expected
    with torch.device("meta"):
        model.layers["1"].spare = torch.nn.Linear(1, 1, bias=False)
    # One weight more: a product forward and two backward.
    assert model.model_args.get_nparams_and_flops(model, 16) == (counted[0] + 1, counted[1] + 6)
    del model.layers["1"].spare, model.layers["2"]
    fewer, less = model.model_args.get_nparams_and_flops(model, 16)
    assert fewer < expected[0] and less < expected[1]
    monkeypatch.setattr(LlamaModel, "flops_per_token", lambda *args: RIGHT(*args) + 1)
    model, _ = model_and_formulas(family, n_kv_heads=2)
    assert model.model_args.get_nparams_and_flops(model, 16) != expected
