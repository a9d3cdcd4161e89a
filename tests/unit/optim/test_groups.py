# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Groups of parameters, by what a step does to the weights."""

import pytest

from tests.support.nightly import nightly
from tests.unit.tiny_trainer import history, parameters, tiny_trainer
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError

OPTIMIZERS = ["AdamW", "TSRAdam", "LoRAMuon", *nightly("Muon")]
OPTIONS = [
    *("--optimizer.lr=0.125", "--optimizer.weight_decay=0.5", "--lr_scheduler.warmup_steps=2"),
    *("--training.max_norm=1e9", "--optimizer.tsr_rank=2", "--optimizer.tsr_embedding_rank=2"),
    "--optimizer.adamw_lr=0",
]
GROUPS = r"""
[[optimizer.groups]]
pattern = 'wq\.A'
lr_multiplier = 0

[[optimizer.groups]]
pattern = '\.A\.'  # not wq's, which an earlier group has
lr_multiplier = 4
weight_decay_multiplier = 0

[[optimizer.groups]]
pattern = 'norm'
weight_decay_multiplier = 2
"""


def written(folder, text):
    path = folder / "groups.toml"
    path.write_text(text)
    return f"--job.config_file={path}"


def step(folder, *options):
    with tiny_trainer(folder, *OPTIONS, *options, exact=False) as trainer:
        before = parameters(trainer.model_parts[0])
        trainer.step += 1
        trainer.train_step(iter(trainer.dataloader))
        return before, parameters(trainer.model_parts[0])


def own_rate(name):
    """Factors on learning rate and weight decay, by hand."""
    if "wq.A" in name:
        return 0, 1
    if ".A." in name:
        return 4, 0
    return (1, 2) if "norm" in name else (1, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_parameter_has_the_rates_of_its_first_group(name, tmp_path):
    """A step with groups is, parameter by parameter, one of a run that has these rates for all."""
    named = f"--optimizer.name={name}"
    before, found = step(tmp_path, named, written(tmp_path, GROUPS))
    for factors in ((0, 1), (4, 0), (1, 2), (1, 1)):
        rate, decay = 0.125 * factors[0], 0.5 * factors[1]
        options = [named, f"--optimizer.lr={rate or 1e-300}", f"--optimizer.weight_decay={decay}"]
        _, expected = step(tmp_path / f"{factors}", *options)
        chosen = [parameter for parameter in found if own_rate(parameter) == factors]
        assert chosen
        for parameter in chosen:
            assert found[parameter].equal(expected[parameter]), parameter
            assert rate == 0 or not found[parameter].equal(before[parameter])


def test_norms_and_gates_need_not_decay(tmp_path):
    all_decay = step(tmp_path / "all")[1]
    found = step(tmp_path / "matrices", "--optimizer.weight_decay_on=matrices")[1]
    without = step(tmp_path / "none", "--optimizer.weight_decay=0")[1]
    for parameter, weights in found.items():
        same, other = (all_decay, without) if weights.dim() == 2 else (without, all_decay)
        assert weights.equal(same[parameter])
        assert not weights.equal(other[parameter])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_embedding_head_and_norms_have_rates_of_their_own(name, tmp_path):
    named = [f"--optimizer.name={name}", "--optimizer.beta1=0"]
    own = ["--optimizer.adamw_lr=0.25", "--optimizer.adamw_weight_decay=0.75"]
    _, found = step(tmp_path / "own", *named, *own)
    for rate, decay, of_matrices in ((0.125, 0.5, True), (0.25, 0.75, False)):
        rates = [f"--optimizer.lr={rate}", f"--optimizer.weight_decay={decay}"]
        _, same = step(tmp_path / f"{decay}", *named, *rates)
        for parameter, weights in found.items():
            is_matrix = parameter.endswith((".A.weight", ".B.weight"))
            assert weights.equal(same[parameter]) is (is_matrix is of_matrices), parameter


@pytest.mark.parametrize(
    ("name", "of_norms", "rate"),
    [("AdamW", "lr", 0), ("AdamW", "adamw_lr", 0.03125), ("Muon", "adamw_lr", 0.03125)],
)
def test_all_groups_follow_the_schedule_and_are_logged(name, of_norms, rate, tmp_path):
    """What is logged is what the optimizers have."""
    options = [f"--optimizer.name={name}", *OPTIONS, f"--optimizer.adamw_lr={rate}"]
    with tiny_trainer(tmp_path, *options, written(tmp_path, GROUPS), exact=False) as trainer:
        names = {p: n for n, p in trainer.model_parts[0].named_parameters()}
        batches, rates = iter(trainer.dataloader), []
        for _ in range(3):
            trainer.step += 1
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            rates.append({names[p]: group["lr"] for group in groups for p in group["params"]})
            trainer.train_step(batches)
        for record, used in zip(history(trainer), rates, strict=True):
            assert record["lr"] == used["layers.0.attention.wo.B.weight"]
            assert record[r"lr/wq\.A"] == used["layers.0.attention.wq.A.weight"] == 0
            assert record[r"lr/\.A\."] == used["layers.0.attention.wo.A.weight"]
            assert record[f"{of_norms}/norm"] == used["norm.weight"]
            assert record[of_norms] == used["output.weight"]
            patterns = {r"lr/wq\.A", r"lr/\.A\.", f"{of_norms}/norm"}  # rates that a parameter has
            assert {key for key in record if "lr/" in key} == patterns
    assert [record["lr"] for record in history(trainer)][:2] == [0.0625, 0.125]


REFUSED = [
    ("pattern = 'wqq'", "[0].pattern: got 'wqq', expected what is found in a parameter"),
    ("pattern = '['", "[0].pattern: got '[', expected a regular expression such as"),
    ("pattern = 'norm'\nlr = 3", "[0].lr: got 3, expected one of pattern, lr_multiplier, weight"),
    (
        "pattern = 'w'\n[[optimizer.groups]]\npattern = 'wo'",
        "[1].pattern: got 'wo', expected what is found in a parameter's name, and no earlier",
    ),
]


@pytest.mark.parametrize(("table", "message"), REFUSED)
def test_what_no_run_can_have_is_refused(table, message, tmp_path):
    options = [written(tmp_path, f"[[optimizer.groups]]\n{table}"), f"--job.dump_folder={tmp_path}"]
    with pytest.raises(ConfigError) as error:
        check_job_config(build_job_config(options), 1, "cpu", data="none")
    assert str(error.value).startswith(f"optimizer.groups{message}")
