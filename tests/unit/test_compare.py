# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/compare.py`` without its runs: what it would run, its rows, its refusals."""

import pytest
import torch

from tests.unit.test_export import load_script
from torchtitan_lr.analysis.published import BOOST_ITERATION_SECONDS
from torchtitan_lr.config_checks import build_job_config, check_job_config

script = load_script("compare")

CONFIG = "train_configs/debug_cola.toml"


def timed(seconds, **more):
    return {"time_metrics/end_to_end(s)": seconds, "throughput/tokens_per_s": 8 / seconds, **more}


FOUND = {
    "rows": [
        {"mesh_dim": "tp", "calls": 3, "bytes": 100},
        {"mesh_dim": "tp", "calls": 1, "bytes": 20},
        {"mesh_dim": "fsdp", "calls": 2, "bytes": 7},
    ],
    "ranks": [
        {"communication": 0.2, "profiled_step": 1.0, "peak_memory_gib": 0.5},
        {"communication": 0.4, "profiled_step": 1.0, "peak_memory_gib": 0.7},
    ],
}


def test_a_row():
    row = script.row_of("btp", [timed(s) for s in (1.0, 4.0, 2.0)], FOUND)
    assert (row["seconds"], row["seconds_min"], row["seconds_max"]) == (2.0, 1.0, 4.0)
    assert row["tokens_per_s"] == 4.0 and row["mfu"] is None
    assert row["comm_bytes"] == 127 and row["comm_calls"] == 6
    assert row["comm_bytes_by_mesh_dim"] == {"tp": 120, "fsdp": 7}
    assert row["comm_seconds"] == pytest.approx(0.3) and row["comm_seconds_min"] == 0.2
    assert row["peak_memory_gib"] == 0.7 and row["ranks"] == 2
    known = script.row_of("btp", [timed(1.0, **{"mfu(%)": 40.0})], FOUND)
    assert known["mfu"] == 40.0


def test_table_and_picture(tmp_path):
    rows = [
        script.row_of(name, [timed(s)], FOUND) | {"published_seconds": published}
        for name, s, published in (("7B full", 3.0, 1.06), ("7B btp", 2.0, 0.72))
    ]
    header, first, second = script.as_text(rows).splitlines()
    assert header.split()[-2:] == ["published", "s"] and first.split()[-1] == "1.06"
    assert "1.50x" in second and "1.50x" not in first
    # Another model has its own first run.
    third = [rows[0], rows[1] | {"run": "13B full"}]
    assert "1.50x" not in script.as_text(third)
    script.draw(rows, tmp_path / "x" / "compare.png")
    assert (tmp_path / "x" / "compare.png").read_bytes()[:4] == b"\x89PNG"


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
