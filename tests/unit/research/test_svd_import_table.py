# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/papers/svd_import.py``: its options, and that finished parts are not repeated."""

import json

import pytest

from tests.scripts import load_script

script = load_script("papers/svd_import")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--steps", "0"], "error: --steps: got 0, expected at least 1"),
        (["--config", "nowhere.toml"], "error: --config: got 'nowhere.toml'"),
        (["--stpes", "3"], "error: got '--stpes'"),
    ],
)
def test_wrong_options_are_refused(options, line, capsys):
    with pytest.raises(SystemExit) as end:
        script.main(["step-1", "--out", "out", *options])
    assert end.value.code == 2 and capsys.readouterr().err.startswith(line)


def test_finished_parts_are_read_back(tmp_path):
    """The table of a folder in which every model, run and evaluation is there."""
    (tmp_path / "exported").mkdir()
    for name, value in (("plain-4", 30.0), ("whitened-4", 20.0), ("dense", 10.0)):
        whitened = 0.1 if name == "whitened-4" else None
        matrices = [{"error": error, "weighted_error": whitened} for error in (0.2, 0.4)]
        for folder, step, part in ((tmp_path / name, 0, 1.0), (tmp_path / name / "run", 7, 0.5)):
            (folder / "checkpoint" / f"step-{step}").mkdir(parents=True)
            known = folder / f"evaluated-step-{step}-3.json"
            known.write_text(json.dumps({"perplexity": part * value}))
        made = {"checkpoint": str(tmp_path / name / "checkpoint/step-0"), "model": "llama_svd"}
        made |= {"parameters": 1000, "matrices": [] if name == "dense" else matrices}
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    options = ["step-1", "--out", str(tmp_path), "--ranks", "4", "--steps", "7"]
    table = script.rows(script.parse_args([*options, "--documents", "3"]))
    assert table == [
        ["svd, plain", "4", "1,000", "0.300", "-", "30.0", "15.0"],
        ["svd, whitened", "4", "1,000", "0.300", "0.100", "20.0", "10.0"],
        ["full", "-", "1,000", "-", "-", "10.0", "5.0"],
    ]
