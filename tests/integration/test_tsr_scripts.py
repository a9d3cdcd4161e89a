# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The scripts about TSR-Adam, at their smallest."""

import json
import sys

import pytest

from tests.integration import runs
from tests.scripts import load_script
from torchtitan_lr.training.metrics import HISTORY_FILE, read_history

SMALL = ["training.local_batch_size=2", "training.seq_len=32", "validation.seq_len=32"]


def test_loss_vs_bytes(tmp_path):
    command = [
        *(sys.executable, "scripts/papers/tsr_loss_vs_bytes.py"),
        *("--steps", "12", "--seeds", "1", "--methods", "AdamW", "TSR rotate"),
        *("--work", str(tmp_path / "runs"), "--out", str(tmp_path / "curves.png")),
        *("--override", *SMALL),
    ]
    first = runs.run(command)
    assert first.status == 0, first.everything
    report = json.loads(first.out)
    assert set(report) == {"AdamW", "TSR rotate"}
    # Gradients of everything, against cores and the head.
    tsr, adamw = report["TSR rotate"], report["AdamW"]
    assert 0 < tsr["bytes_per_step"] < adamw["bytes_per_step"] / 1.5
    assert tsr["peak_bytes"] > tsr["bytes_per_step"] and adamw["validation_loss"] < 9
    assert (tmp_path / "curves.png").stat().st_size > 10_000

    # Again: finished runs are taken as they are, a run that lacks steps goes on.
    history = tmp_path / "runs" / "AdamW-0" / HISTORY_FILE
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/*.jsonl")}
    again = runs.run(command)
    assert again.status == 0, again.everything
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert json.loads(again.out) == report
    assert len(read_history(history)) >= 12


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("papers/tsr_loss_vs_bytes", ["--steps", "3"], "--steps: got 3"),
        ("papers/tsr_loss_vs_bytes", ["--seeds", "0"], "--seeds: got 0"),
        ("papers/tsr_loss_vs_bytes", ["--config", "no.toml"], "CONFIG: got 'no.toml'"),
        ("papers/slow_link", ["--mbit", "0"], "--mbit: got 0"),
        ("papers/slow_link", ["--steps", "1"], "--steps: got 1"),
        ("papers/slow_link", ["--exchange", "-1"], "--exchange: got -1"),
        ("check/bench_exchange", ["--megabytes", "0"], "--megabytes: got 0"),
        ("check/bench_exchange", ["--repeats", "0"], "--repeats: got 0"),
        ("check/bench_exchange", [], "start it with torchrun"),
        ("check/bench_tsr_gpu", ["--repeats", "0"], "--repeats: got 0"),
    ],
)
def test_bad_arguments_are_told_in_one_line(name, arguments, told, capsys):
    with pytest.raises(SystemExit) as info:
        load_script(name).main(arguments)
    assert info.value.code == 2
    assert told in capsys.readouterr().err


def test_slow_link():
    arguments = ["--steps", "6", "--mbit", "400", "--exchange", "2", "--override", *SMALL]
    done = runs.run([sys.executable, "scripts/papers/slow_link.py", *arguments])
    assert done.status == 0, done.everything
    if done.out.startswith("skipped: "):
        pytest.skip(done.out.strip())
    report = json.loads(done.out)
    adamw, tsr = report["AdamW"], report["TSRAdam"]
    assert tsr["bytes_per_step"] < adamw["bytes_per_step"] / 1.5
    # The control for the link: no step is faster than its bytes at 400 Mbit/s.
    assert adamw["seconds"] > 0.8 * adamw["bytes_per_step"] / 50e6
    exchange = report["exchange"]
    assert exchange.keys() == {"dense", "sketch", "sparse"}
    # Each rank sends the other half of its 2 MB.
    assert exchange["dense"]["seconds"] > 0.8 * 1e6 / 50e6


def test_slow_link_skips_with_a_reason(capsys, monkeypatch):
    script = load_script("papers/slow_link")
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert script.main([]) == 0
    assert capsys.readouterr().out == "skipped: ip (iproute2) is not installed\n"


def test_gpu_benchmark_skips_with_a_reason(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load_script("check/bench_tsr_gpu").main([]) == 0
    assert capsys.readouterr().out == "skipped: no GPU\n"
