# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``torchtitan-lr config show``: every key of a run, once, with its value and its origin."""

import dataclasses

import pytest

from tests.support.nightly import nightly
from torchtitan_lr.checkpoints.record import Record
from torchtitan_lr.checkpoints.run_record import run_record, write_record
from torchtitan_lr.commands.config import _flat, as_toml, read_origins, read_run
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.paths import shipped_configs
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch import placement
from torchtitan_lr.models.configured import llama_args

DEFAULT, MODEL, LINE = "default", "model", "command line"
FILE = "train_configs/debug_cola.toml"


@pytest.fixture(autouse=True)
def machine(variables, monkeypatch, tmp_path):
    """A folder that is no checkout, on a machine without GPUs and without settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement, "gpu_count", lambda: 0)


def shown(config, *overrides):
    settings, _ = read_origins(config, overrides)
    found = {setting.key: (setting.value, setting.origin) for setting in settings}
    assert len(found) == len(settings)
    return found


def test_each_key_has_its_origin():
    found = shown(
        *("debug_cola", "--training.steps=3", "--metrics.no_enable_tensorboard"),
        *("--training.seq-len", "64"),
    )
    expected = {
        "training.steps": (3, LINE),  # over the TOML's
        "training.seq_len": (64, LINE),
        "metrics.enable_tensorboard": (False, LINE),
        "training.local_batch_size": (8, FILE),
        "optimizer.lr": (6e-3, FILE),
        "training.max_norm": (0.5, DEFAULT),
        "quantize.linear.mx.filter_fqns": (["output"], DEFAULT),
        "low_rank.rank": (0, DEFAULT),
        "args.vocab_size": (4096, MODEL),
        "args.dim": (128, MODEL),
        "args.rank_ffn": (32, MODEL),
        "args.activation": ("both", MODEL),
    }
    assert {key: found[key] for key in expected} == expected
    keys = {key for key, (_, origin) in found.items() if origin == LINE}
    assert keys == {
        *("job.config_file", "training.steps", "training.seq_len"),
        "metrics.enable_tensorboard",
    }


@pytest.mark.parametrize(
    ("name", "family", "lr", "adamw_lr"),
    [
        ("Spectron", "cola", 1e-1, 6e-2),
        ("Spectron", "svd", 4e-2, 6e-2),
        ("Muon", "full", 4e-3, 6e-2),
        ("LoRAMuon", "lax", 1.5e-2, 6e-2),
        ("TSRAdam", "cola", 1e-2, 0),
    ],
)
def test_rates_belong_to_the_named_optimizer_and_the_family(name, family, lr, adamw_lr):
    """The file's rate is AdamW's."""
    named = [f"--optimizer.name={name}", f"--model.name=llama_{family}"]
    found = shown("cola_7b", *named, "--training.global_batch_size=-1")
    assert found["optimizer.lr"] == (lr, f"default of {name}")
    assert found["optimizer.adamw_lr"][0] == adamw_lr
    given = shown("cola_7b", f"--optimizer.name={name}", "--optimizer.lr=0.5")
    assert given["optimizer.lr"] == (0.5, "command line")
    same = shown("cola_7b", "--optimizer.name=Adam")["optimizer.lr"]
    assert same == (1e-3, "train_configs/cola_7b.toml")


def test_what_the_launcher_changes_is_its_own(monkeypatch):
    monkeypatch.setenv("NGPU", "1")
    found = shown("debug_cola")
    assert found["parallelism.tensor_parallel_degree"] == (1, "launcher")
    degree = shown("debug_cola", "--parallelism.tensor_parallel_degree=1")
    assert degree["parallelism.tensor_parallel_degree"] == (1, LINE)


NAMES = list(shipped_configs())
EVERY_THIRD = NAMES[::3]


@pytest.mark.parametrize("name", [*EVERY_THIRD, *nightly(*sorted({*NAMES} - {*EVERY_THIRD}))])
def test_what_is_shown_configures_the_same_run(name, tmp_path):
    """The output is a TOML file, of every key; read again, it is the same configuration."""
    settings, note = read_origins(name, [])
    (tmp_path / "shown.toml").write_text(as_toml(settings))
    before = build_job_config([f"--job.config_file={name}"])
    after = build_job_config(["--job.config_file=shown.toml"])
    after.job.config_file = before.job.config_file
    assert after == before and llama_args(after) == llama_args(before)
    keys = {setting.key for setting in settings if setting.origin != MODEL}
    assert keys == {*_flat(dataclasses.asdict(before))} and len(keys) > 150
    # What the ranks here cannot run is shown too.
    if before.parallelism.tensor_parallel_degree > 4:
        assert note.startswith("note: it does not run here: parallelism.tensor_parallel_degree")


def test_a_run_and_a_step_say_what_they_were_trained_with(tmp_path):
    here = f"--job.dump_folder={tmp_path}"
    config = build_job_config(["--job.config_file=debug_cola", "--optimizer.lr=0.5", here])
    changes = {"changes": [{"after_step": 3, "optimizer.lr": [0.25, 0.5]}]}
    record = run_record(config, 2) | changes
    write_record(config, record)
    step = tmp_path / "checkpoint/step-4"
    step.mkdir(parents=True)
    Record({}, record).write(step)
    for folder in (tmp_path, step):
        settings, note = read_run(folder)
        found = {setting.key: (setting.value, setting.origin) for setting in settings}
        assert found["optimizer.lr"] == (0.5, "run") and found["optimizer.beta1"][1] == DEFAULT
        assert found["args.dim"] == (128, MODEL)
        assert note == "note: changed after step 3: optimizer.lr = 0.5 (was 0.25)"
    (step / "step.json").unlink()
    with pytest.raises(ConfigError, match=r"^CONFIG: got .*step-4', expected the folder of a run"):
        read_run(step)
