# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import json

import pytest
import torch

from tests.unit.tiny import tokens
from tests.unit.tools.test_export_hf import CASES, model_of
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.tools.export import export_factored, export_hf
from torchtitan_lr.tools.exported import is_export, load_export
from torchtitan_lr.tools.weights import ModelWeights


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["factored", "hf", "kept"])
def test_an_export_is_read_back(tmp_path, case, form):
    ours = model_of(case)
    assert not is_export(tmp_path)
    if form == "factored":
        export_factored(ModelWeights(ours), tmp_path, max_bytes=100_000)
    else:
        keep = form == "kept" and ours.model_args.low_rank
        export_hf(ModelWeights(ours), tmp_path, max_bytes=100_000, keep_factors=keep)
    assert is_export(tmp_path)
    again = load_export(tmp_path)
    ids = tokens(ours.model_args)
    with torch.no_grad():
        expected, found = ours(ids), again(ids)
    assert ((found - expected).abs().max() / expected.abs().max()).item() < 1e-13
    merged = case == "svd" and form == "hf"
    assert torch.equal(found, expected) or merged
    assert again.model_args.family == ("full" if merged else ours.model_args.family)


@pytest.mark.parametrize("what", ["weights", "index", "config", "family"])
def test_a_damaged_export_is_refused(tmp_path, what):
    export_hf(ModelWeights(model_of("cola")), tmp_path, max_bytes=100_000)
    config = tmp_path / "config.json"
    if what == "weights":
        file = sorted(tmp_path.glob("*.safetensors"))[0]
        file.write_bytes(file.read_bytes()[:100])
    elif what == "index":
        (tmp_path / "model.safetensors.index.json").write_text("{")
    elif what == "config":
        config.write_text("{}")
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"family": "lora"}))
    with pytest.raises(ConfigError) as refused:
        load_export(tmp_path)
    assert "\n" not in str(refused.value)
