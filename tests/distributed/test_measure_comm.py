# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The command that counts a step; every layout's counts are in `test_layout`."""

import json
from functools import partial

import pytest

from tests.support.rank_pool import RankPool
from torchtitan_lr.commands import measure_comm
from torchtitan_lr.commands.main import main
from torchtitan_lr.ledger.ledger import COUNTS


def test_command(
    four_ranks: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a real step of the trainer: every row agrees, and has the promised keys."""
    step = partial(four_ranks.run, measure_comm.measure)
    monkeypatch.setattr(measure_comm, "run_on_ranks", lambda _, arguments, __: step(arguments)[0])
    monkeypatch.setenv("NGPU", "4")
    # Checkpointing that repeats collectives.
    options = ["--parallelism.tensor_parallel_degree=2", "--activation_checkpoint.mode=full"]
    assert main(["measure-comm", "debug_lax", "--json", *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    numbers = {*COUNTS, "expected_calls", "expected_elements"}
    assert all(row.keys() == {"scope", "pass", "op", "mesh_dim", "dtype"} | numbers for row in rows)
    assert {row["scope"] for row in rows} == {"embedding", "block", "head", "step"}
    assert {row["mesh_dim"] for row in rows if row["scope"] == "block"} == {"fsdp", "tp"}
