# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TOML files and corpora that a run reads, checked before it starts."""

import importlib.util

import pytest

from tests.commands import ROOT
from tests.unit.checks.test_config_checks import MAIN, SHIPPED, check, refusal
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.data.prepare import wanted

CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_train_config_passes(path, tmp_path, monkeypatch):
    """The main job's text and tokenizer stand in for those of the Hub."""
    world, device = 8, "cuda"
    if "[fault_tolerance]" in path.read_text():  # one replica; torchft, an extra, need not be here
        world, device = 1, "cpu"
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    overrides = [f"--job.dump_folder={tmp_path}", f"--model.hf_assets_path={SHIPPED}"]
    if wanted(build_job_config([f"--job.config_file={path}"]))[0].sources[0].name == "hf":
        overrides.append("--training.dataset=cpython")
    if "initial_load_path" in path.read_text():
        overrides.append("--checkpoint.initial_load_path=")  # it need not be here
    config = check(*overrides, world=world, device=device, config_file=path)
    own = tmp_path / "replica_0" if config.fault_tolerance.enable else tmp_path
    assert config.job.dump_folder == str(own)
    assert config.lr_scheduler.warmup_steps * 10 in range(
        config.training.steps - 10, config.training.steps + 1
    )


def test_a_local_corpus_alone_is_validated_on(tmp_path):
    """The main job's TOML, and the two arguments that name one's own text."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "text {i}"}}\n' for i in range(900)))
    argv = ["--training.dataset=local", f"--training.dataset_path={tmp_path}"]
    config = build_job_config([f"--job.config_file={MAIN}", *argv])
    assert config.validation.enable
    assert wanted(config, "validation")[0].sources == wanted(config)[0].sources
    assert wanted(config)[0].sources[0].paths == (str(tmp_path),)


def test_a_corpus_without_one_sequence_is_refused_before_ranks_start(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a few words"}\n{"text": "some words"}\n')
    argv = ["--training.dataset=local", f"--training.dataset_path={tmp_path}"]
    argv += [f"--job.dump_folder={tmp_path}", "--validation.no_enable"]
    text = refusal(*argv)
    assert text.startswith("training.seq_len: got 128, expected at most ")
    (tmp_path / "a.jsonl").write_text('{"text": "a few words"}\n' * 100)
    check(*argv)


def test_local_corpus_that_is_not_there(tmp_path):
    argv = ["--training.dataset=local", f"--training.dataset_path={tmp_path}/*.txt"]
    text = refusal(*argv, f"--job.dump_folder={tmp_path}")
    assert text.startswith("training.dataset_path: got ")
    (tmp_path / "a.txt").write_text("some text to train on\n" * 5000)
    check(*argv, f"--job.dump_folder={tmp_path}")


def test_toml_types_reach_the_user(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text("[training]\nsteps = 'ten'\n")
    assert refusal(config_file=path) == (
        "training.steps: got 'ten', expected an integer such as 10000"
    )


def test_missing_config_file(tmp_path):
    assert refusal(config_file=tmp_path / "none.toml").startswith("job.config_file: got ")
