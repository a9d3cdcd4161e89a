# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/compare.py`` without its runs: what it would run, its rows, its refusals."""

from pathlib import Path

import pytest
import torch
from torchtitan_lr.formulas.papers.published import BOOST_ITERATION_SECONDS

from tests.commands import Command
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError

script = Command("compare")

CONFIG = "train_configs/debug_cola.toml"


def test_three_runs_of_one_file():
    options = script._parse([CONFIG, "--steps=3", "--low_rank.rank=16"])
    cases = script.cases_of(options)
    assert [case.name for case in cases] == ["full", "vanilla", "btp"]
    for case in cases:
        arguments = script.arguments_of(case, options)
        config = build_job_config([f"--job.config_file={CONFIG}", *arguments])
        check_job_config(config, 4, "cpu")
        assert config.training.steps == 2 + 3 + 2  # warm-up, timed, watched
        assert config.metrics.log_freq == 1 and not config.checkpoint.enable
        assert config.low_rank.rank == (0 if case.name == "full" else 16)


def modes_of(*arguments):
    """Mode of every run by name, as the run's configuration has it."""
    options = script._parse(list(arguments))
    modes = {}
    for case in script.cases_of(options):
        overrides = script.arguments_of(case, options)
        config = build_job_config([f"--job.config_file={case.config}", *overrides])
        check_job_config(config, case.ranks or 4, "cpu")
        modes[case.name] = config.activation_checkpoint.mode
        assert case.checkpointing == modes[case.name]
    return modes


LOW_RANK = "--activation_checkpoint.mode=low_rank"


def test_runs_that_are_compared_share_a_mode_of_checkpointing():
    assert set(modes_of(CONFIG, LOW_RANK).values()) == {"full"}
    # Without full rank, all have the configured one.
    assert modes_of(CONFIG, LOW_RANK, "--plans=vanilla,btp") == {
        "vanilla": "low_rank",
        "btp": "low_rank",
    }
    named = modes_of(CONFIG, LOW_RANK, "--checkpointing=btp=low_rank,vanilla=none")
    assert named == {"full": "full", "vanilla": "none", "btp": "low_rank"}


def test_files_of_several_modes_need_them_named(tmp_path):
    other = tmp_path / "other.toml"
    text = Path("train_configs/debug_svd.toml").read_text()
    other.write_text(text.replace('mode = "none"', 'mode = "full"'))
    assert text != other.read_text()
    named = ("--checkpointing", "debug_cola=none,other=full")
    assert modes_of(CONFIG, str(other), *named) == {"debug_cola": "none", "other": "full"}
    assert set(modes_of(CONFIG, str(other), "--activation_checkpoint.mode=full").values()) == {
        "full"
    }
    with pytest.raises(ConfigError, match="debug_cola=none,other=full', expected one mode"):
        script.cases_of(script._parse([CONFIG, str(other)]))


def test_several_files_are_taken_as_they_are():
    other = "train_configs/debug_svd.toml"
    cases = script.cases_of(script._parse([CONFIG, other]))
    assert [(c.name, c.config, c.arguments) for c in cases] == [
        ("debug_cola", CONFIG, []),
        ("debug_svd", other, []),
    ]


def test_the_papers_runs(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    options = script._parse(["--tables"])
    cases = script.cases_of(options)
    assert capsys.readouterr().out == "skipped: 13B needs 8 GPUs, this machine has 4\n"
    assert [c.name for c in cases[-3:]] == ["7B full", "7B vanilla_replicated", "7B btp"]
    assert [c.published for c in cases[-3:]] == [1.06, 1.64, 0.72]
    assert [c.ranks for c in cases] == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    for case in cases:
        arguments = [f"--job.config_file={case.config}", *script.arguments_of(case, options)]
        check_job_config(build_job_config(arguments), case.ranks, "cuda")
    assert [row.ranks for row in BOOST_ITERATION_SECONDS] == [1, 2, 4, 8]


def test_the_papers_runs_without_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert script.main(["--tables"]) == 0
    assert "skipped: 1B_boost needs 1 GPUs, this machine has 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "CONFIG: got nothing"),
        (["no.toml"], "CONFIG: got 'no.toml', expected a TOML file"),
        ([CONFIG, "--steps=0"], "--steps: got 0, expected at least 1"),
        ([CONFIG, "--warmup=-1"], "--warmup: got -1"),
        ([CONFIG, "--plans=full,btq"], "--plans: got 'btq', expected some of full"),
        ([CONFIG, "--tables"], "--tables: got CONFIG"),
        ([CONFIG, CONFIG], "CONFIG: got 'debug_cola', expected files of different names"),
        ([CONFIG, "--checkpointing=vanilla"], "--checkpointing: got 'vanilla', expected"),
        ([CONFIG, "--checkpointing=full=low_rank"], "activation_checkpoint.mode: got 'low_rank'"),
        ([CONFIG, "--beams=4"], "got '--beams=4'"),
        ([CONFIG, "--low_rank.rnk=4"], "low_rank.rnk"),
        ([CONFIG, "--parallelism.tensor_parallel_degree=3"], "tensor_parallel_degree: got 3"),
    ],
)
def test_refusals(monkeypatch, capsys, arguments, told):
    monkeypatch.setenv("NGPU", "4")
    try:
        status = script.main(arguments)
    except SystemExit as end:
        status = end.code
    err = capsys.readouterr().err
    assert status == 2 and told in err and err.count("\n") == 1
