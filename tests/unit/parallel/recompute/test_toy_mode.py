# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A mode from outside the package is accepted, refused, trained and estimated like the others."""

import ast
import copy
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.commands import ROOT
from tests.unit.tiny import build_tiny, tiny_args, tokens
from tests.unit.tiny_trainer import history, tiny_trainer
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.commands.estimate_report import alternative_modes
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.schema import AC_MODES
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.estimate.memory import rehearse_run, repeated_by_block
from torchtitan_lr.estimate.run import read_run
from torchtitan_lr.estimate.timing import repeated_flops
from torchtitan_lr.formulas.activations import layer_recompute_flops, recompute_flops
from torchtitan_lr.formulas.flops import FORWARD_AND_BACKWARD, layer_flops
from torchtitan_lr.parallel.recompute.activation_checkpoint import (
    MODES,
    apply_activation_checkpoint,
)
from torchtitan_lr.scaling.variants import read_modes

DEBUG = f"--job.config_file={ROOT}/train_configs/debug_cola.toml"
NAMED = "--activation_checkpoint.mode=feed_forward"
MODULE = "--experimental.custom_import=tests.toy_mode"
TP = "--parallelism.tensor_parallel_degree=2"
KNOWN = "'selective', 'full', 'memory_budget', 'none', 'low_rank'"
REPEATS_ATTENTION = ("selective", "full", "memory_budget")


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    yield
    sys.modules.pop("tests.toy_mode", None)
    MODES.pop("feed_forward", None)
    if "feed_forward" in AC_MODES:
        AC_MODES.remove("feed_forward")


def config_of(*arguments, device="cpu"):
    common = [DEBUG, TP, "--checkpoint.no_enable"]
    config = build_job_config([*common, *arguments])
    check_job_config(config, 2, device, on_paper=True)
    return config


def refusal(*arguments, device="cpu"):
    with pytest.raises(ConfigError) as info:
        config_of(*arguments, device=device)
    assert "\n" not in str(info.value)
    return str(info.value)


def run_of(mode, *arguments):
    options = (f"--activation_checkpoint.mode={mode}", MODULE, *arguments)
    return read_run(config_of(*options, device="cuda"), 2)


def test_every_name_has_a_mode():
    assert sorted(MODES) == sorted(AC_MODES)
    assert all(name == mode.name for name, mode in MODES.items())


@pytest.mark.parametrize("arguments", [[], ["--experimental.custom_import=torchtitan_lr.specs"]])
def test_an_unregistered_name_is_refused(arguments):
    text = f"activation_checkpoint.mode: got 'feed_forward', expected one of {KNOWN}"
    assert refusal(NAMED, *arguments) == text


def test_a_registered_mode_is_accepted_from_a_toml_too(tmp_path):
    assert config_of(NAMED, MODULE).activation_checkpoint.mode == "feed_forward"
    toml = tmp_path / "toy.toml"
    toml.write_text(
        '[activation_checkpoint]\nmode = "feed_forward"\n'
        '[experimental]\ncustom_import = "tests.toy_mode"\n'
    )
    config = build_job_config([f"--job.config_file={toml}"])
    assert config.activation_checkpoint.mode == "feed_forward"
    text = f"expected one of {KNOWN}, 'feed_forward'"
    assert refusal("--activation_checkpoint.mode=no_such_mode").endswith(text)


def test_it_refuses_in_one_line_what_it_cannot_do():
    text = "compile.enable: got True, expected false with the mode feed_forward"
    assert refusal(NAMED, MODULE, "--compile.enable") == text


@pytest.mark.parametrize("mode", REPEATS_ATTENTION)
def test_modes_that_repeat_attention_do_not_compile_on_a_cpu(mode):
    options = (f"--activation_checkpoint.mode={mode}", "--compile.enable")
    options += ("--compile.backend=aot_eager",)
    text = f"'{mode}', expected 'none' or 'low_rank' with compile.enable and tensor parallelism"
    assert refusal(*options) == f"activation_checkpoint.mode: got {text} on a CPU"
    config_of(*options, device="cuda")


def loss_and_gradients(model):
    loss = model(tokens(model.model_args)).square().sum()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("family", ["full", "cola", "lax"])
def test_gradients_are_the_same(family):
    """The first control: a product of every feed-forward runs once more."""
    importlib.import_module("tests.toy_mode")
    config = SimpleNamespace(
        activation_checkpoint=SimpleNamespace(mode="feed_forward", preserve_rng_state=False)
    )
    plain = build_tiny(family, torch.float64)
    checkpointed = copy.deepcopy(plain)
    apply_activation_checkpoint(checkpointed, config)
    found, counts = [], []
    for model in (plain, checkpointed):
        with FlopCounterMode(display=False) as counter:
            found.append(loss_and_gradients(model))
        counts.append(counter.get_total_flops())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    share = layer_flops(tiny_args(family), 16).feed_forward / FORWARD_AND_BACKWARD
    assert 0 < counts[1] - counts[0] <= 3 * 2 * share  # blocks, sequences


def test_it_trains_one_process_in_parity(tmp_path):
    """Three steps of the real trainer, in fp64: every weight is the same."""
    weights, losses = [], []
    for mode in ("none", "feed_forward"):
        options = ("--training.steps=3", f"--activation_checkpoint.mode={mode}", MODULE)
        with tiny_trainer(tmp_path / mode, *options) as trainer:
            trainer.train()
            losses.append([row["loss_metrics/global_avg_loss"] for row in history(trainer)])
            parameters = trainer.model_parts[0].parameters()
            weights.append([parameter.detach().clone() for parameter in parameters])
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_the_estimate_counts_it():
    kept = {mode: rehearse_run(run_of(mode)).block for mode in ("none", "feed_forward", "full")}
    assert kept["full"] < kept["feed_forward"] < kept["none"]
    run = run_of("feed_forward", "--training.global_batch_size=-1")
    share = layer_flops(run.args, run.seq_len).feed_forward / FORWARD_AND_BACKWARD / run.tp
    assert repeated_flops(run) == share
    repeated = {mode: repeated_by_block(run_of(mode)) for mode in ("feed_forward", "full")}
    sent = {mode: sum(row.elements for row in rows) for mode, rows in repeated.items()}
    assert 0 < sent["feed_forward"] < sent["full"]


def test_comparisons_name_it():
    config = config_of(NAMED, MODULE, device="cuda")
    assert set(alternative_modes(config, 2).values()) == {"feed_forward"}
    assert read_modes("btp=feed_forward", ["btp"]) == {"btp": "feed_forward"}
    with pytest.raises(ConfigError, match="and none, selective, full, low_rank, memory_budget, fe"):
        read_modes("btp=no_such_mode", ["btp"])


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
def test_modes_and_formulas_agree_on_what_is_repeated(save, tp):
    """Two statements of the same FLOPs: the modes', and those in closed form."""
    flag = "" if save else "no_"
    options = (f"--activation_checkpoint.{flag}low_rank_save_attention",)
    options += (f"--parallelism.tensor_parallel_degree={tp}",)
    run = run_of("low_rank", *options)
    assert repeated_flops(run) == recompute_flops(run.args, run.seq_len, save, tp)
    whole = layer_recompute_flops(run.args, run.seq_len, tp)
    assert repeated_flops(run_of("full", *options)) == whole
    every_third = "--activation_checkpoint.selective_ac_option=3"
    assert repeated_flops(run_of("selective", *options, every_third)) == whole / 3
    scores = layer_flops(run.args, run.seq_len).attention_scores / FORWARD_AND_BACKWARD / tp
    by_operators = "--activation_checkpoint.selective_ac_option=op"
    assert repeated_flops(run_of("selective", *options, by_operators)) == (whole - scores) / 2
    budget = ("--activation_checkpoint.memory_budget=0.25", "--compile.enable")
    assert repeated_flops(run_of("memory_budget", *options, *budget)) == 0.75 * whole
    assert repeated_flops(run_of("none", *options)) == 0


def compared_names(source):
    """Names of modes that a file compares with a mode, a section's or a run's."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        texts = {c.value for side in sides for c in ast.walk(side) if isinstance(c, ast.Constant)}
        if any("mode" in ast.unparse(s) or "checkpointing" in ast.unparse(s) for s in sides):
            found += [name for name in AC_MODES if name in texts]
    return found


def test_only_a_modes_page_compares_its_name():
    assert compared_names('x = section.mode == "full" or mode in ("none", "op")')
    assert not compared_names('x = section.mode == "other" or family == "full"')
    files = [path for part in ("torchtitan_lr", "scripts") for path in (ROOT / part).rglob("*.py")]
    assert len(files) > 200
    assert [path for path in files if compared_names(path.read_text())] == []
