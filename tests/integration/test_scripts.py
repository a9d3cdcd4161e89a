# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``export`` and ``generate`` on checkpoints that ranks wrote."""

import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import LlamaForCausalLM

from tests.commands import Command
from tests.integration import runs
from torchtitan_lr.hf.loading import read_model_args
from torchtitan_lr.models.llama import LlamaModel

EXPORT = [sys.executable, "-m", "torchtitan_lr", "export"]
GENERATE = [sys.executable, "-m", "torchtitan_lr", "generate"]
PROMPT = ["--prompt", "import os", "--max_new_tokens=12"]


@pytest.fixture(scope="module")
def steps(finished, undisturbed):
    """The last checkpoints of 4 ranks' CoLA and of 2 ranks' SVD."""
    return {
        "cola": finished.folder / "checkpoint" / "step-6",
        "svd": undisturbed.folder / "checkpoint" / "step-14",
    }


@pytest.fixture(scope="module")
def scripts(steps, tmp_path_factory):
    """Each use once as a command."""
    base = tmp_path_factory.mktemp("scripts")
    commands = {
        "cola": [*EXPORT, steps["cola"], base / "cola"],
        "svd_hf": [*EXPORT, steps["svd"], base / "svd_hf", "--format", "hf"],
        "seed_1": [*GENERATE, *PROMPT, steps["cola"], "--seed=1"],
    }
    return base, runs.run_all({name: (command, {}) for name, command in commands.items()})


def call(name, *arguments):
    """Run a command in this process, which has imported torch already."""
    return Command(name).main([str(argument) for argument in arguments])


def stored(step, tmp_path):
    """A checkpoint's content, read by torch's own converter."""
    dcp_to_torch_save(step, tmp_path / "all.pt")
    return torch.load(tmp_path / "all.pt", weights_only=False)


def test_factored_export_holds_the_checkpoint(scripts, steps, tmp_path):
    base, done = scripts
    assert done["cola"].status == 0, done["cola"].everything
    weights = load_file(base / "cola" / "model.safetensors")
    expected = stored(steps["cola"], tmp_path)
    assert "optimizer" in expected  # the converter read everything
    assert all(torch.equal(value, expected[key]) for key, value in weights.items())
    model = LlamaModel(read_model_args(base / "cola" / "model_args.json"))
    model.load_state_dict(weights)
    # The control: the model as the run's first step found it is another one.
    fresh = LlamaModel(model.model_args)
    fresh.init_weights()
    assert not any(torch.equal(weights[name], v) for name, v in fresh.state_dict().items())


def test_merged_export_is_the_same_llama(scripts, steps, tmp_path):
    base, done = scripts
    assert done["svd_hf"].status == 0, done["svd_hf"].everything
    assert call("export", steps["svd"], tmp_path) == 0
    model = LlamaModel(read_model_args(tmp_path / "model_args.json"))
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    theirs = LlamaForCausalLM.from_pretrained(base / "svd_hf").eval()
    tokens = torch.randint(4096, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, logits = model.eval()(tokens), theirs(tokens).logits
        other = LlamaForCausalLM(theirs.config).eval()(tokens).logits

    def difference(a):
        return ((a - expected).abs().max() / expected.abs().max()).item()

    assert difference(logits) < 1e-5
    assert difference(other) > 1e-2  # the control: the same shape, other weights


def test_generate_continues_the_prompt(scripts, steps, capsys):
    _, done = scripts
    assert done["seed_1"].status == 0, done["seed_1"].everything
    text = done["seed_1"].out
    assert text.startswith("import os")
    assert len(text) > len("import os\n")
    # Another process with the same seed says the same, and with another seed something else.
    for seed, same in ((1, True), (2, False)):
        assert call("generate", *PROMPT, steps["cola"], f"--seed={seed}") == 0
        assert (capsys.readouterr().out == text) is same
