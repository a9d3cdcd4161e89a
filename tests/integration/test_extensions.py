# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A family, a plan and a codec of a user's own folder, together, in every command."""

import json
import shutil
import sys

import pytest

from tests.integration import runs

EXTRA = """
[parallelism]
tensor_parallel_degree = 2
tp_plan = "gathered"

[grad_compression]
codec = "sign"

[experimental]
custom_import = "toys"
"""
IMPORT = "--experimental.custom_import=toys"


@pytest.fixture
def command(tmp_path):
    """Runs a command in a folder that has the three files and a run's TOML."""
    for name in ("toy_family.py", "toy_plan.py", "toy_codec.py"):
        shutil.copy(runs.ROOT / "tests" / name, tmp_path)
    (tmp_path / "toys.py").write_text("import toy_codec, toy_family, toy_plan\n")
    runs.write_config(tmp_path / "run", "llama_tanh", steps=3, interval=3, extra=EXTRA)

    def run(*words, status=0):
        done = runs.run([sys.executable, "-m", "torchtitan_lr", *words], cwd=tmp_path, NGPU="4")
        assert done.status == status, done.everything
        return done

    return run


@pytest.mark.nightly  # one by one: tests/distributed/test_toy_plan.py, tests/unit
def test_extensions_work_in_the_commands(command, tmp_path):
    command("train", "run.toml")
    records = runs.exact(runs.history(tmp_path / "run"))
    losses = [record["loss_metrics/global_avg_loss"] for record in records[:3]]
    assert losses[2] < losses[0]
    loss = json.loads(command("evaluate", "run", IMPORT, "--json").out)["loss"]
    # Training computed in bfloat16.
    assert loss == pytest.approx(records[-1]["validation_metrics/loss"], rel=5e-3)
    refused = command("export", "run", "exported", IMPORT, status=2).everything
    assert "whose code an export can bring" in refused
    assert "as configured" in command("estimate", "run.toml").out
    rows = json.loads(command("measure-comm", "run.toml", "--json").out)
    assert "uint8" in {row["dtype"] for row in rows}  # the signs, as the formula says
    refused = command("evaluate", "run", "--corpus", "cpython", status=2).everything
    assert "--experimental.custom_import=MODULE" in refused and "Traceback" not in refused
