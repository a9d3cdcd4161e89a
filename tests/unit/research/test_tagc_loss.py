# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/papers/tagc_loss.py`` on histories of runs: its table, its picture, its arguments."""

import json

import pytest

from tests.scripts import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("papers/tagc_loss")


def write_history(folder, final, steps=20):
    folder.mkdir(parents=True)
    records = [
        {
            "step": step,
            "loss_metrics/global_avg_loss": 8 - 0.1 * step,
            "grad_compression/unpeeled_share": 0.0,
            "grad_compression/index_collisions": 7.0,
        }
        for step in range(1, steps + 1)
    ]
    records.append({"step": steps, "validation_metrics/loss": final})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.mark.parametrize(("final", "status"), [(5.18, 0), (7.0, 1)])
def test_finished_runs_are_compared_and_not_repeated(script, tmp_path, capsys, final, status):
    write_history(tmp_path / "2_dense", 5.0)
    write_history(tmp_path / "2_sketch_4x", final)
    picture = tmp_path / "loss.png"
    arguments = ["--ranks=2", "--kinds=sketch", "--levels=4x", "--steps=20", "--json"]
    assert script.main([*arguments, f"--work={tmp_path}", f"--out={picture}"]) == status
    dense, sketch = json.loads(capsys.readouterr().out)
    assert dense["increase_percent"] == 0 and dense["bits"] == 32
    assert sketch["increase_percent"] == pytest.approx(100 * (final / 5 - 1))
    assert sketch["theta"] == 0.9014 and sketch["raised"] and sketch["bits"] == 9
    assert sketch["index_collisions"] == 7
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_every_kind_and_level_is_run(script):
    runs = script.cases(["sketch", "sparse", "sum1"], ["2x", "4x", "10x"])
    assert len(runs) == 10
    assert "--grad_compression.index=sum1" in runs["sum1 2x"]
    assert "--grad_compression.codec=sparse" in runs["sparse 10x"]


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--steps=1", "--steps: got 1, expected at least 10"),
        ("--config=no.toml", "CONFIG: got 'no.toml', expected a TOML file"),
        ("--kinds=gzip", "--kinds: got 'gzip', expected some of sketch, sparse, sum1"),
        ("--levels=3x", "--levels: got '3x', expected some of 2x, 4x, 10x"),
        ("--ranks=1", "--ranks: got '1', expected numbers above 1"),
        ("--ranks=3", "--batch: got 16, expected a multiple of [3]"),
    ],
)
def test_wrong_arguments_are_one_line(script, capsys, argument, text):
    with pytest.raises(SystemExit) as info:
        script.main([argument])
    assert info.value.code == 2
    assert text in capsys.readouterr().err
