# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""TOML files: where they are found, what they include, and the paths in them."""

import operator
from pathlib import Path

import pytest

from tests.commands import ROOT
from torchtitan_lr.commands.main import COMMANDS, parser_of
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.parse import load_toml
from torchtitan_lr.config.paths import find_config
from torchtitan_lr.errors import ConfigError

SHIPPED = str(ROOT / "train_configs" / "debug_cola.toml")


@pytest.fixture
def write(monkeypatch, tmp_path):
    """Writes a file into the working folder."""
    monkeypatch.chdir(tmp_path)

    def write_file(name, text):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)

    return write_file


def built(file, *overrides):
    return build_job_config([f"--job.config_file={file}", *overrides])


def test_the_including_file_wins_key_by_key(write):
    write("base/a.toml", '[training]\nsteps = 1\nseq_len = 8\n[metrics]\nwandb_tags = ["a", "b"]\n')
    write("b.toml", 'include = "base/a.toml"\n[training]\nsteps = 2\n[optimizer]\nlr = 0.5\n')
    write("c.toml", 'include = "b.toml"\n[metrics]\nwandb_tags = ["c"]\n')
    # The control: the other order would give 1 step, and joined arrays three tags.
    assert load_toml("c.toml") == {
        "training": {"steps": 2, "seq_len": 8},
        "metrics": {"wandb_tags": ["c"]},
        "optimizer": {"lr": 0.5},
    }
    config = built("c.toml", "--training.seq_len=16")
    assert (config.training.steps, config.training.seq_len) == (2, 16)


@pytest.mark.parametrize("name", ["debug_cola", "debug_cola.toml", "train_configs/debug_cola.toml"])
def test_a_shipped_file_is_found_by_its_name_after_the_users_own(write, name):
    assert find_config(name) == find_config(f"./{name}") == SHIPPED
    shipped = load_toml(SHIPPED)
    write("a.toml", f'include = "{name}"\n[training]\nsteps = 2\n')
    assert load_toml("a.toml") == shipped | {"training": shipped["training"] | {"steps": 2}}
    write(name, "[training]\nseq_len = 9\n")  # a neighbour comes first
    assert load_toml("a.toml") == {"training": {"steps": 2, "seq_len": 9}}
    assert find_config(name) == name


LOOP = "got 'a.toml', expected a file that does not lead back"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('include = "debug_coal.toml"', "did you mean debug_cola"),
        ('include = "none.toml"', "include of a.toml: got 'none.toml', expected a TOML file"),
        ('include = "a.toml"', LOOP),
        ('include = "b.toml"', LOOP),
        ('include = "c.toml"', "training.stpes: got 1, expected a known key"),
        ("[training]\nsteps = \n", "a.toml:2', expected valid TOML"),
    ],
)
def test_refusals_name_the_file_or_the_key(write, text, message):
    write("b.toml", 'include = "a.toml"\n')
    write("c.toml", "[training]\nstpes = 1\n")
    write("a.toml", text + "\n[training]\nsteps = 1\n")
    with pytest.raises(ConfigError) as info:
        built("a.toml")
    assert message in str(info.value) and "\n" not in str(info.value)


@pytest.mark.parametrize(("name", "near"), [("cola_6m", "cola_60m"), ("zzzz", ""), (".", "")])
def test_a_wrong_name_is_refused_with_near_ones(write, name, near):
    with pytest.raises(ConfigError) as info:
        built(name)
    text = str(info.value)
    assert text.startswith(f"job.config_file: got '{name}', expected a TOML file such as ")
    assert (f"did you mean {near}" in text) if near else ("did you mean" not in text)


WARM_UP = [
    ('include = "cola_60m"', [], 839),  # of 8,393 steps
    ('include = "cola_60m"', ["--training.steps=100"], 10),
    ('include = "cola_60m"', ["--training.steps=9", "--lr_scheduler.warmup_steps=50"], 50),
    ('include = "cola_60m"\n[training]\nsteps = 100', [], 10),
    ('include = "cola_60m"\n[lr_scheduler]\nwarmup_steps = 9000', [], 9000),  # as it says
    ("[training]\nsteps = 100", [], 10),  # CoLA's
    ("[training]\nsteps = 100", ["--optimizer.name=Spectron"], 5),
    ("[training]\nsteps = 100", ["--model.name=llama_full"], 2),  # torchtitan's 200 of 10,000
    ("[lr_scheduler]\nwarmup_steps = 7", ["--lr_scheduler.warmup_ratio=0.5"], 5000),
]


@pytest.mark.parametrize(("text", "overrides", "warmup"), WARM_UP)
def test_warm_up_is_a_share_of_the_steps(write, text, overrides, warmup):
    write("mine.toml", text + "\n")
    assert built("mine.toml", *overrides).lr_scheduler.warmup_steps == warmup


def test_warm_up_is_said_once(write):
    write("mine.toml", "[lr_scheduler]\nwarmup_steps = 3\nwarmup_ratio = 0.5\n")
    with pytest.raises(ConfigError, match=r"^lr_scheduler\.warmup_ratio: got 0\.5"):
        built("mine.toml")


KEYS = (
    *("job.dump_folder", "job.save_config_file", "checkpoint.folder"),
    *("checkpoint.initial_load_path", "model.hf_assets_path", "model.flavor"),
    *("training.dataset_path", "training.token_folder", "validation.dataset_path"),
    *("metrics.save_tb_folder", "profiling.save_traces_folder", "comm.save_traces_folder"),
    *("profiling.save_memory_snapshot_folder", "parallelism.pipeline_parallel_schedule_csv"),
)


def test_paths_are_expanded_once_for_every_check_and_use(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "big"))
    for written, expected in (("~/a b", "a b"), ("${SCRATCH}/c", "big/c"), ("a$b/$HOME", "")):
        config = build_job_config([f"--{key}={written}" for key in KEYS])
        found = {key: operator.attrgetter(key)(config) for key in KEYS}
        assert found == dict.fromkeys(KEYS, str(tmp_path / expected) if expected else written)
    write("a.toml", '[[training.mixture]]\ndataset = "local"\npath = "~/b.txt"\n')
    assert built("~/a.toml").training.mixture[0]["path"] == str(tmp_path / "b.txt")
    outputs = {
        action
        for name in COMMANDS
        for action in parser_of(name)._actions
        if "--out" in action.option_strings
    }
    assert len(outputs) >= 4
    assert all(action.type("~/x") == tmp_path / "x" for action in outputs)


def test_a_variable_that_is_not_set_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("EMPTY", "")
    for path in ("${NO_SUCH_NAME}/x", "${EMPTY}/x"):
        with pytest.raises(ConfigError, match=r"^job\.dump_folder: got .*/x', expected .* is set"):
            build_job_config([f"--job.dump_folder={path}"])
    with pytest.raises(SystemExit):
        parser_of("prepare").parse_args(["a.txt", "--out=${NO_SUCH_NAME}/x"])
    assert "--out: got '${NO_SUCH_NAME}/x', expected a path whose" in capsys.readouterr().err
