# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scaling`` in processes of its own."""

import json
import sys

import pytest

from tests.integration import runs
from tests.support.nightly import nightly

VALIDATION = "validation_metrics/loss"
LR = [sys.executable, "-m", "torchtitan_lr"]


EXPERIMENT = """
name = "toy"
config = "{config}"
overrides = ["validation.steps=1"]
seeds = [0]
tokens_per_parameter = [0.04]
learning_rates = [3e-3]

[families.full]
[families.cola]

[sizes.a]
dim = 16
ffn_dim = 48
n_heads = 2
n_layers = 2
"""


def test_a_scaling_experiment_has_the_losses_of_its_histories(tmp_path):
    config = runs.write_config(tmp_path / "dump", "llama_full")
    (tmp_path / "toy.toml").write_text(EXPERIMENT.format(config=config))
    work = tmp_path / "work"
    arguments = [tmp_path / "toy.toml", f"--out={work}"]
    done = runs.run([*LR, "scaling", "run", *arguments, "--jobs=2"], NGPU="2")
    assert done.status == 0, done.everything
    fitted = runs.run([*LR, "scaling", "fit", *arguments])
    assert fitted.status == 0, fitted.everything
    found = json.loads((work / "scaling.json").read_text())
    assert [(p["family"], p["size"]) for p in found["points"]] == [("full", "a"), ("cola", "a")]
    for point in found["points"]:
        folders = sorted(work.glob(f"{point['family']}_a_*"))
        validated = [[r[VALIDATION] for r in runs.history(f) if VALIDATION in r] for f in folders]
        assert list(point["losses"].values()) == [values[-1] for values in validated]
    assert fitted.out.strip() == (work / "scaling.md").read_text().strip()


FAMILY = """
from torchtitan_lr.models.families import ModelFamily
from torchtitan_lr.optim.entries import OptimizerEntry, register_optimizer
from torchtitan_lr.training.register import register_model_family
from torchtitan.components.optimizer import build_optimizers

register_model_family(ModelFamily("own_family"))
register_optimizer(OptimizerEntry("OwnAdam", build_optimizers))
"""


@pytest.mark.parametrize("place", ["command line", *nightly("family")])
def test_a_family_and_an_optimizer_from_outside(tmp_path, place):
    """Named by custom_import, in a process that does not know them yet."""
    (tmp_path / "own_family.py").write_text(FAMILY)
    module = "experimental.custom_import=own_family"
    own = ["optimizer.name=OwnAdam", *[module] * (place == "family")]
    config = runs.write_config(tmp_path / "dump", "llama_full")
    text = EXPERIMENT.format(config=config)
    family = f"[families.own_family]\noverrides = {own}"
    (tmp_path / "toy.toml").write_text(text.replace("[families.cola]", family))
    command = [*LR, "scaling", "plan", "toy.toml", "--out=work"]
    done = runs.run(command + [f"--{module}"] * (place == "command line"), cwd=tmp_path)
    assert done.status == 0, done.everything
    assert ["own_family", "a"] in [line.split()[:2] for line in done.out.splitlines()]
