# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``measure-comm``: equal blocks are one."""

import pytest

from torchtitan_lr.commands import measure_comm as script
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.experiments.start import place_run


def row(scope, calls=1):
    names = {"scope": scope, "pass": "forward", "op": "all_gather", "mesh_dim": "fsdp"}
    counts = {"calls": calls, "elements": 8, "bytes": 32}
    expected = {"expected_calls": 1, "expected_elements": 8}
    return {**names, "dtype": "float32", **counts, **expected}


def test_a_folder_with_a_run_is_neither_refused_nor_used(tmp_path, monkeypatch):
    step = tmp_path / "checkpoint" / "step-3"
    step.mkdir(parents=True)
    (step / "step.json").touch()
    arguments = ["--job.config_file=debug_cola", f"--job.dump_folder={tmp_path}", *script.QUIET]
    monkeypatch.setenv("NGPU", "1")
    with pytest.raises(ConfigError, match=r"job\.dump_folder: .* has checkpoints of one"):
        place_run(arguments)  # the control
    placed = []
    monkeypatch.setattr(script, "run_on_ranks", lambda *found: placed.append(found) or [])
    script.run_ranks(arguments)
    ((_, given, ranks),) = placed
    folders = [argument for argument in given if argument.startswith("--job.dump_folder=")]
    assert folders[0] == arguments[1] != folders[-1] and ranks == 1


def test_equal_blocks_are_one():
    table = [row(scope) for scope in ("embedding", "block 0", "block 1", "head")]
    assert [r["scope"] for r in script.one_block(table)] == ["embedding", "block", "head"]
    assert len(script.one_block([row("block 0"), row("block 1", calls=2)])) == 2  # the control
    # Of all blocks, each of them.
    told = script.total([r | {"bytes": 2_500_000} for r in table])
    assert told == "total per step of rank 0: 10.00 MB (2 blocks 5.00 MB, the rest 5.00 MB)"
