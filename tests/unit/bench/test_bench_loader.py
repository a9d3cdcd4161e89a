# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/check/bench_loader.py``: every case is timed, and a full cache is one."""

import json

import pytest

from tests.scripts import load_script


def test_every_case_is_timed(tmp_path, capsys):
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"line {i} of some text\n" * 200)
    sizes = ["--seq-len=32", "--batch=4", "--steps=40", "--waits=3", "--step-ms=2", "--repeats=1"]
    arguments = [f"--path={tmp_path}", *sizes]
    bench = load_script("check/bench_loader")
    assert bench.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["rows"]
    cases = {f"{case}, {ahead} steps ahead" for case in bench.CASES for ahead in (0, 2)}
    assert rows.keys() == cases | {bench.ENCODE}
    assert report["tokens_per_step"] == 128
    for row in rows.values():
        assert 0 < row["slowest"] <= row["tokens_per_s"] <= row["fastest"]
    # Reading tokens takes a fraction of the CPU time of making them.
    full, none = (rows[f"{case}, 0 steps ahead"] for case in ("full cache", "no cache"))
    assert full["tokens_per_cpu_s"] > 1.5 * none["tokens_per_cpu_s"]
    text = bench._as_text(report)
    assert len(text.splitlines()) == len(rows) + 2


def test_bad_arguments_are_told_in_one_line(capsys):
    main = load_script("check/bench_loader").main
    for arguments, told in ((["--steps", "0"], "--steps: got 0"), (["--batch=-1"], "--batch: got")):
        with pytest.raises(SystemExit) as info:
            main(arguments)
        assert info.value.code == 2
        assert told in capsys.readouterr().err
    assert main(["--path=/no/such"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: training.dataset_path: got '/no/such'")
