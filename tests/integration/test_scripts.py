# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/export.py`` and ``scripts/generate.py`` on checkpoints that ranks wrote."""

import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import LlamaForCausalLM

from tests.integration import runs
from torchtitan_lr.models import LlamaModel
from torchtitan_lr.models.loading import read_model_args

EXPORT = [sys.executable, "scripts/export.py"]
GENERATE = [sys.executable, "scripts/generate.py", "--prompt", "import os", "--max_new_tokens=12"]


@pytest.fixture(scope="module")
def scripts(finished, undisturbed, tmp_path_factory):
    """All commands at the same time, on 4 ranks' CoLA and 2 ranks' SVD."""
    base = tmp_path_factory.mktemp("scripts")
    cola = finished.folder / "checkpoint" / "step-6"
    svd = undisturbed.folder / "checkpoint" / "step-30"
    sample = [*GENERATE, "--checkpoint", cola]
    commands = {
        "cola": [*EXPORT, cola, base / "cola"],
        "svd": [*EXPORT, svd, base / "svd"],
        "svd_hf": [*EXPORT, svd, base / "svd_hf", "--format", "hf"],
        "cola_hf": [*EXPORT, cola, base / "cola_hf", "--format", "hf"],
        "seed_1": [*sample, "--seed=1"],
        "seed_1_again": [*sample, "--seed=1"],
        "seed_2": [*sample, "--seed=2"],
        "no_checkpoint": [*GENERATE, "--checkpoint", base / "a" / "b" / "step-1"],
        "temperature": [*sample, "--temperature=-1"],
    }
    return base, runs.run_all({name: (command, {}) for name, command in commands.items()})


def stored(step, tmp_path):
    """A checkpoint's content, read by torch's own converter."""
    dcp_to_torch_save(step, tmp_path / "all.pt")
    return torch.load(tmp_path / "all.pt", weights_only=False)


@pytest.mark.parametrize("name", ["cola", "svd"])
def test_factored_export_holds_the_checkpoint(scripts, finished, undisturbed, tmp_path, name):
    base, done = scripts
    assert done[name].status == 0, done[name].everything
    step = {
        "cola": finished.folder / "checkpoint" / "step-6",
        "svd": undisturbed.folder / "checkpoint" / "step-30",
    }[name]
    weights = load_file(base / name / "model.safetensors")
    expected = stored(step, tmp_path)
    assert "optimizer" in expected  # the converter read everything
    assert all(torch.equal(value, expected[key]) for key, value in weights.items())
    model = LlamaModel(read_model_args(base / name / "model_args.json"))
    model.load_state_dict(weights)
    # The control: a model as the run's first step found it is another one.
    fresh = LlamaModel(model.model_args)
    fresh.init_weights()
    changed = [not torch.equal(weights[k], value) for k, value in fresh.state_dict().items()]
    assert all(changed)


def test_merged_export_is_the_same_llama(scripts):
    base, done = scripts
    assert done["svd_hf"].status == 0, done["svd_hf"].everything
    model = LlamaModel(read_model_args(base / "svd" / "model_args.json"))
    model.load_state_dict(load_file(base / "svd" / "model.safetensors"))
    theirs = LlamaForCausalLM.from_pretrained(base / "svd_hf").eval()
    tokens = torch.randint(4096, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, logits = model.eval()(tokens), theirs(tokens).logits
        other = LlamaForCausalLM(theirs.config).eval()(tokens).logits

    def difference(a):
        return ((a - expected).abs().max() / expected.abs().max()).item()

    assert difference(logits) < 1e-5
    assert difference(other) > 1e-2  # the control: the same shape, other weights


def test_generate_continues_the_prompt(scripts):
    _, done = scripts
    texts = {}
    for name in ("seed_1", "seed_1_again", "seed_2"):
        assert done[name].status == 0, done[name].everything
        texts[name] = done[name].out
        assert texts[name].startswith("import os")
        assert len(texts[name]) > len("import os\n")
    assert texts["seed_1"] == texts["seed_1_again"]
    assert texts["seed_1"] != texts["seed_2"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("cola_hf", "--format: got 'hf', expected 'factored'"),
        ("no_checkpoint", "CHECKPOINT: got "),
        ("temperature", "--temperature: got -1.0, expected "),
    ],
)
def test_refusals(scripts, name, line):
    base, done = scripts
    assert done[name].status == 2, done[name].everything
    assert done[name].out == ""
    (said,) = done[name].err.splitlines()
    assert line in said
    assert not (base / name).exists()
