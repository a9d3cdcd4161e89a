# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/check/bench_checkpointing.py``: every form is timed, and following is no recording."""

import json

import pytest

from tests.scripts import load_script


def test_every_form_is_timed(capsys):
    bench = load_script("check/bench_checkpointing")
    assert bench.main(["--layers=1", "--steps=8", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["per_block"]
    assert tuple(rows) == bench.FORMS
    for row in rows.values():
        assert row["step_ms"] > 0 and row["low"] <= row["extra_ms"] <= row["high"]
    # Measured: 0.4 of torch's. A recording of every pass takes 4 times torch's.
    assert rows["low_rank"]["extra_ms"] < 1.5 * rows["full"]["extra_ms"]


def test_bad_arguments(capsys):
    with pytest.raises(SystemExit) as info:
        load_script("check/bench_checkpointing").main(["--steps=1"])
    assert info.value.code == 2
    assert "--steps: got 1" in capsys.readouterr().err
