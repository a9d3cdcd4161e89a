# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A TOML, a command line or a run with what has left the project is refused in one line."""

import json

import pytest

from tests.support.config_checks import MAIN
from tests.support.run_folders import export, write_run
from torchtitan_lr.checks.stored import check_record
from torchtitan_lr.commands.main import main
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.exported import read_export_args
from torchtitan_lr.hf.loading import read_run_config

LAST = "is the last commit that reads it"

# key, a value that is lost, whether weights of such a run are read
LOST = [
    ("fault_tolerance.enable", True, True),
    ("fault_tolerance.lighthouse", "127.0.0.1:29510", True),
    ("parallelism.tp_plan", "btp_caat", False),
    ("parallelism.tp_norm_stat", "column", True),
    ("job.custom_config_module", "torchtitan_lr.experiments.replicas.job_config", True),
]


def refusal(function, *args):
    with pytest.raises(ConfigError) as info:
        function(*args)
    assert "\n" not in str(info.value) and LAST in str(info.value)
    return str(info.value)


@pytest.fixture
def run(tmp_path):
    """Returns a function that writes a run with a checkpoint of step 4 and one changed key."""

    def write(key, value):
        config = build_job_config([f"--job.config_file={MAIN}", f"--job.dump_folder={tmp_path}"])
        record = json.loads(json.dumps(config.to_dict()))
        section, _, name = key.partition(".")
        record.setdefault(section, {})[name] = value
        (tmp_path / "job_config.json").write_text(json.dumps(record))
        step = tmp_path / "checkpoint" / "step-4"
        step.mkdir(parents=True)
        (step / ".metadata").touch()
        return config, step

    return write


@pytest.mark.parametrize(("key", "value", "weights"), LOST, ids=[key for key, _, _ in LOST])
def test_what_has_left_is_refused(key, value, weights, run, tmp_path):
    section, _, name = key.partition(".")
    text = json.dumps(value)
    toml = tmp_path / "old.toml"
    toml.write_text(f"[{section}]\n{name} = {text}\n")
    flag = f"--{key}" if value is True else f"--{key}={value}"
    assert refusal(build_job_config, [f"--job.config_file={toml}"]).startswith(f"{key}: got ")
    assert refusal(build_job_config, [f"--job.config_file={MAIN}", flag]).startswith(key)
    config, step = run(key, value)
    assert refusal(check_record, config, 1).startswith(key)
    if weights:
        assert build_job_config([], json.loads((tmp_path / "job_config.json").read_text()))
        assert read_run_config(step).model.flavor == "debug"
    else:
        assert refusal(read_run_config, step).startswith(key)


@pytest.mark.parametrize(
    "arguments", [["--fault_tolerance.enable=false"], ["--fault_tolerance.no_enable"]]
)
def test_a_value_that_stays_is_accepted(arguments):
    assert not build_job_config([f"--job.config_file={MAIN}", *arguments]).fault_tolerance.enable


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "debug_replicas"],
        ["train", "INCLUDING"],
        ["estimate", "debug_replicas"],
        ["evaluate", "outputs/debug_cola", "--tasks", "hellaswag"],
        ["generate", "outputs/debug_cola", "--prompt", "x", "--cache", "latent"],
    ],
)
def test_what_a_command_had_is_refused(arguments, tmp_path, capsys):
    including = tmp_path / "mine.toml"
    including.write_text('include = "debug_replicas"\n')
    assert main([str(including) if name == "INCLUDING" else name for name in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and LAST in error


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("form", "file"), [("factored", "model_args.json"), ("hf", "config.json")])
def test_an_export_with_lanes_in_its_bottlenecks_is_refused(form, file, tmp_path):
    step, _ = write_run(tmp_path / "run", "cola")
    assert export.main(["--format", form, str(step), str(tmp_path / form)]) == 0
    path = tmp_path / form / file
    values = json.loads(path.read_text())
    values.get("torchtitan_lr", values)["lanes"] = 4
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"^caat\.lanes: got 4, .* until 8020035a\)$"):
        read_export_args(path.parent)
