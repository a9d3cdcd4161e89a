# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Jobs of the acceptance, their limits, and what is read; the rehearsal is in tests/integration."""

import json
import os
import sys
import time

import pytest

from scripts.bench import acceptance_readers as readers
from scripts.bench.acceptance import Job, Part, SkippedError, run_job, run_part
from scripts.bench.acceptance_page import as_markdown, ratios
from scripts.bench.acceptance_parts import FULL, Site, make_parts
from scripts.check import bench_block, bench_tsr_gpu
from tests.commands import ROOT
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.launch.environment import read_environment
from torchtitan_lr.launch.placement import place

GPU = {"device": "a GPU", "devices": 1, "cpu": "a CPU", "commit": "abc"}


def shell(text, read=json.loads, limit=60, left=60, **variables):
    job = Job("it", ["sh", "-c", text], read, limit, variables)
    return run_job(job, ROOT, time.monotonic() + left)


def test_a_job_passes(monkeypatch):
    monkeypatch.setenv("NGPU", "7")  # the user's own does not count
    found = shell('echo "{\\"ranks\\": \\"$NGPU$X\\"}"', X="y")
    assert (found["status"], found["values"], found["reason"]) == ("passed", {"ranks": "y"}, "")
    assert found["command"].startswith("X=y sh -c ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'error: key: got 1' >&2; echo more >&2; exit 2", "error: key: got 1"),
        ("exit 3", "it ended with status 3"),
        ("kill -9 $$", "it ended with status -9"),
        ("echo no JSON", "invalid output: JSONDecodeError"),
        ("echo '{}'; exit 1", "it ended with status 1"),
    ],
)
def test_a_job_fails_with_a_reason(text, reason):
    found = shell(text)
    assert found["status"] == "failed" and found["reason"].startswith(reason)
    assert (found["values"], "\n" in found["reason"]) == ({}, False)


def test_what_a_failed_job_measured_is_kept():
    found = shell("echo; exit 1", lambda said: {"gib": 3.0, "wrong": "12% off"})
    assert (found["status"], found["reason"]) == ("failed", "12% off")
    assert found["values"] == {"gib": 3.0}
    assert shell("echo", lambda said: {"gib": 3.0, "wrong": "12% off"})["status"] == "passed"


def test_a_job_is_skipped_with_a_reason():
    def nothing(said):
        raise SkippedError("needs a CUDA device")

    assert shell("echo 'skipped: no GPU'")["reason"] == "no GPU"
    assert shell("echo")["status"] == "failed"
    found = shell("echo", nothing)
    assert (found["status"], found["reason"]) == ("skipped", "needs a CUDA device")
    found = shell("echo '{}'", left=1)
    assert (found["status"], found["reason"], found["seconds"]) == ("skipped", "no time is left", 0)
    job = Job("it", ["/no/such/program"], json.loads, 60, {}, "no GPU here")
    assert run_job(job, ROOT, time.monotonic() + 60)["reason"] == "no GPU here"


def test_the_limit_ends_a_job_with_all_its_processes(tmp_path):
    """The program and what it started wait for a pipe that nothing is written into."""
    for name in ("never", "alive"):
        os.mkfifo(tmp_path / name)
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    found = shell(f"cd {tmp_path}; exec 9>alive; (read x <never) & wait", limit=1)
    assert (found["status"], found["reason"]) == ("failed", "no end within 1 s: killed")
    deadline = time.monotonic() + 60
    with open(alive, "rb", buffering=0) as file:
        while file.read(1) != b"":  # None while a process holds the other end
            assert time.monotonic() < deadline
            time.sleep(0.01)


def arguments_of(job):
    """The overrides of a training run's command, its TOML first."""
    words = [word for word in job.command if word.startswith("--") and "." in word]
    toml = [word for word in job.command if word.endswith(".toml") and "=" not in word]
    return [f"--job.config_file={name}" for name in toml] + words


def test_full_size_runs_are_accepted(monkeypatch, tmp_path):
    """Every training run of the acceptance on a GPU, as its launcher checks it."""
    monkeypatch.chdir(ROOT)
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("NGPU", "1")
    parts = {part.name: part for part in make_parts(Site(FULL, GPU, ROOT, tmp_path))}
    jobs = [job for name in ("main", "speed", "memory") for job in parts[name].jobs]
    assert len(jobs) == 1 + 8 + 2 + 6
    for job in jobs:
        arguments = arguments_of(job)
        if not any(argument.startswith("--job.config_file") for argument in arguments):
            arguments.insert(0, "--job.config_file=train_configs/debug_cola.toml")
        placed = place(read_environment(), arguments)
        check_job_config(placed.config, 1, "cuda")
        assert placed.config.training.dataset == "python_stdlib"  # no network
    assert parts["main"].jobs[0].command[0] == "./run_llama_train.sh"
    settings = {
        (c.model.name, c.training.seq_len, c.training.local_batch_size, c.compile.enable)
        for c in (build_job_config(arguments_of(job)) for job in parts["speed"].jobs)
    }
    shapes = ((256, 64), (4096, 4))
    models = ("llama_full", "llama_cola")
    assert settings == {(m, *s, c) for m in models for s in shapes for c in (False, True)}
    for job in parts["block"].jobs:
        options = bench_block._parse(job.command[2:])
        assert (options.flavor, options.ranks, options.json) == ("7B", 4, True)
    _, script, *words = parts["peers"].jobs[0].command
    if (ROOT / script).is_file():
        source = (ROOT / script).read_text()
        names = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert [name for name in names if f'"{name}"' not in source] == []
    assert bench_tsr_gpu._parse(parts["tsr"].jobs[0].command[2:]).flavors == ["350M", "1B"]


def test_without_a_gpu_every_part_is_skipped(tmp_path):
    machine = GPU | {"device": None, "devices": 0}
    parts = make_parts(Site(FULL, machine, ROOT, tmp_path))
    found = {part.name: run_part(part, ROOT, time.monotonic() + 60) for part in parts}
    jobs = [job for part in found.values() for job in part["jobs"]]
    assert len(jobs) > 20
    assert {(job["status"], job["reason"]) for job in jobs} == {("skipped", "no GPU here")}
    report = {"scale": "full", "date": "today", "machine": machine, "parts": found}
    assert "| speed | 10 skipped | 0 |" in as_markdown(report)


def test_missing_requirements_do_not_stop_the_main_job(tmp_path):
    """The shell scripts would install; the launcher does without."""
    machine = GPU | {"missing": "not installed: wandb"}
    main, smoke, *_ = make_parts(Site(FULL, machine, ROOT, tmp_path))
    assert main.jobs[0].command[:3] == [sys.executable, "-m", "torchtitan_lr", "train"]
    assert smoke.jobs[0].why_not == "requirements of pyproject.toml: not installed: wandb"


def test_pytest_is_read():
    found = readers.read_pytest("F\n=== 1 failed, 20 passed, 3 skipped in 2.50s ===\n")
    assert found["wrong"] == "1 failed, 20 passed, 3 skipped in 2.50s"
    assert (found["passed"], found["failed"], found["skipped"]) == (20, 1, 3)
    assert readers.read_pytest("2 passed in 61.00s (0:01:01)")["passed"] == 2
    skipped = "SKIPPED [5] tests/gpu/test_x.py:12: needs a CUDA device\n5 skipped in 0.1s\n"
    with pytest.raises(SkippedError, match="needs a CUDA device"):
        readers.read_pytest(skipped)
    with pytest.raises(ValueError, match="no summary"):
        readers.read_pytest("")


def test_speed_is_of_the_windows_after_the_first(tmp_path):
    windows = [(1, 10.0), (10, 100.0), (20, 120.0), (30, 104.0)]
    lines = [
        {"step": s, "throughput/tokens_per_s": v, "time_metrics/end_to_end(s)": 16 / v}
        for s, v in windows
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").write_text('{"mfu": 40.5, "peak_memory_gib": 3.25}')
    found = readers.read_speed(tmp_path, 99, "")
    assert found.pop("spread") == pytest.approx(100 * 20 / 104)
    assert found.pop("step_ms") == pytest.approx(1e3 * 16 / 104)
    expected = {"tokens_per_s": 104.0, "mfu": 40.5, "peak_memory_gib": 3.25, "published": 99}
    assert found == expected
    (tmp_path / "metrics.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ValueError, match="one window"):
        readers.read_speed(tmp_path, None, "")


def test_memory_and_numbers_are_read():
    said = json.dumps({"estimated": {"weights": 2**30, "peak": 3 * 2**30}, "measured": 4 * 2**30})
    found = readers.read_memory(said)
    assert (found["estimated_gib"], found["measured_gib"], found["error"]) == (3.0, 4.0, -25.0)
    assert found["wrong"].startswith("the estimate is -25.0% off")
    found = readers.read_json('{"device": "x", "1B": {"a": 1, "ok": true, "b": [2.5, {"c": 3}]}}')
    rows = [(row["quantity"], row["value"]) for row in found["table"]["rows"]]
    assert rows == [("1B.a", 1), ("1B.b.0", 2.5), ("1B.b.1.c", 3)]


def test_the_page_has_ratios_tables_and_reasons():
    speeds = [("full 256×64 eager", 100.0), ("cola 256×64 eager", 150.0), ("cola 4096×4 x", 7.0)]
    results = [
        {"name": name, "status": "passed", "reason": "", "seconds": 1.0, "command": f"run {name}"}
        | {"values": {"tokens_per_s": speed, "mfu": None}}
        for name, speed in speeds
    ]
    assert ratios(results) == {"256×64 eager": 1.5}
    failed = {"name": "other", "status": "failed", "reason": "a|b", "seconds": 1.0}
    results.append(failed | {"command": "run other", "values": {}})
    columns = {"tokens_per_s": "tokens/s", "mfu": "MFU %"}
    part = {"title": "Speed", "columns": columns, "seconds": 4.4, "jobs": results}
    report = {"scale": "full", "date": "today", "machine": GPU, "parts": {"speed": part}}
    page = as_markdown(report)
    assert "| cola 256×64 eager | 150 | - |" in page and "| 256×64 eager | 1.50 |" in page
    assert "| speed | 3 passed, 1 failed | 4 |" in page
    assert "- other failed: a|b\n" in page and "```bash\nrun full 256×64 eager\n" in page
    assert "rehearsal" not in page and "rehearsal" in as_markdown(report | {"scale": "tiny"})


def test_parts_run_their_jobs_in_order():
    jobs = [Job(str(n), ["sh", "-c", f"echo {n}"], lambda said: {"n": int(said)}, 60) for n in "12"]
    found = run_part(Part("p", "A part", jobs, {"n": "number"}), ROOT, time.monotonic() + 60)
    assert [job["values"] for job in found["jobs"]] == [{"n": 1}, {"n": 2}]
    assert (found["title"], found["columns"]) == ("A part", {"n": "number"})
    known = {"1": found["jobs"][0] | {"values": {"n": 9}}}
    again = run_part(Part("p", "A part", jobs), ROOT, time.monotonic() + 60, known)
    assert [job["values"] for job in again["jobs"]] == [{"n": 9}, {"n": 2}]
