# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``estimate --layouts``: each row is what ``estimate`` prints for that layout."""

import json

import pytest

from tests.commands import Command
from torchtitan_lr.costs.layouts import MOST_TOKENS

SHAPE = ["--training.seq_len=2048", "--training.global_batch_size=64"]
SHAPE += ["--training.local_batch_size=1", "--validation.seq_len=256"]


@pytest.fixture(scope="module")
def estimate():
    return Command("estimate")


def test_every_row_is_an_estimate(estimate, capsys):
    """The first and the last, as a plain estimate has them."""
    assert estimate.main(["cola_60m", "--world=4", *SHAPE, "--layouts", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["layouts"]
    seconds = [row["step_time"]["total"] for row in rows]
    assert seconds == sorted(seconds)
    whole = [row["microbatch"] for row in rows if "cp" not in row["layout"]]
    assert max(whole) * 2048 == MOST_TOKENS
    kinds = {row["layout"] for row in rows}
    # cp 2 and 4 leave less than a thousand tokens or need an even row; replicas are none or all.
    assert {"fsdp 4", "replicas 4", "tp 2, fsdp 2", "pp 4", "cp 2, fsdp 2"} <= kinds
    for row in (rows[0], rows[-1]):
        degrees = dict(part.split() for part in row["layout"].split(", "))
        keys = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel"}
        keys["replicas"] = "data_parallel_replicate"
        own = [f"--parallelism.{keys[k]}_degree={degrees[k]}" for k in keys if k in degrees]
        local = row["microbatch"] * (row["microbatches"] if "pp" in degrees else 1)
        own += [f"--training.local_batch_size={local}"]
        own += [f"--parallelism.pipeline_parallel_microbatch_size={row['microbatch']}"]
        assert estimate.main(["cola_60m", "--world=4", *SHAPE, *own, "--json"]) == 0
        plain = json.loads(capsys.readouterr().out)["columns"]["as configured"]
        assert row["step_time"]["total"] == pytest.approx(plain["step_time"]["total"], rel=1e-9)
        assert row["peak_bytes"] == pytest.approx(plain["memory_bytes"]["peak"], rel=1e-9)


def test_a_pipeline_has_a_micro_batch_for_each_stage(estimate, capsys):
    few = ["--training.global_batch_size=8", "--layouts", "--json"]
    assert estimate.main(["cola_60m", "--world=4", *SHAPE, *few]) == 0
    rows = json.loads(capsys.readouterr().out)["layouts"]
    found = {row["layout"]: row["microbatches"] for row in rows if "pp" in row["layout"]}
    assert found["pp 4"] >= 4 and min(found.values()) >= 2


def test_the_table_says_why_others_lose(estimate, capsys):
    assert estimate.main(["cola_60m", "--world=4", *SHAPE, "--layouts"]) == 0
    out = capsys.readouterr().out
    assert "H100" in out and "GPU-hours" in out and "times as long, by" in out
    assert estimate.main(["cola_1b", "cola_60m", "--layouts"]) == 2
    assert "--layouts" in capsys.readouterr().err
