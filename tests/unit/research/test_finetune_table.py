# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/papers/finetune_table.py`` on histories of runs: its sums, its page, its arguments."""

import json
from types import SimpleNamespace

import pytest

from tests.scripts import load_script
from torchtitan_lr.errors import ConfigError


@pytest.fixture(scope="module")
def script():
    return load_script("papers/finetune_table")


def write_history(folder, sent):
    folder.mkdir()
    records = [
        {"step": step, "loss_metrics/global_avg_loss": 5.0, "comm_bytes/dp_replicate": count}
        for step, count in enumerate(sent, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_the_page_has_the_bytes_of_all_steps(script, tmp_path):
    scores = {"loss": 5.5, "exact": 0.125, "f1": 0.25, "pairs": 8}
    results = {"before": scores}
    for name, sent in (("AdamW", [3_000_000] * 4), ("TSR-Adam", [2_000_000, 0, 1_000_000, 0])):
        write_history(tmp_path / name, sent)
        results[name] = scores | script._sent(tmp_path / name) | {"lr": 0.1}
    config = SimpleNamespace(
        training=SimpleNamespace(steps=4, dataset="python_stdlib_docs"),
        checkpoint=SimpleNamespace(initial_load_path="there"),
        validation=SimpleNamespace(seq_len=128),
    )
    options = SimpleNamespace(config="a.toml", ranks=2, overrides=["--training.steps=4"])
    page = script._page(options, config, results)
    assert "| before | 5.5000 | 12.5% | 25.0% |  |  |" in page
    assert "| AdamW | 5.5000 | 12.5% | 25.0% | 3.000 MB | 12.0 MB |" in page
    assert "| TSR-Adam | 5.5000 | 12.5% | 25.0% | 0.750 MB | 3.0 MB |" in page
    assert "4.0 times fewer bytes" in page and "1.5 times fewer in its most" in page
    assert "--ranks=2 --training.steps=4" in page and "| TSR | 20M | 85.54% |" in page
    assert max(map(len, page.splitlines())) <= 100


def test_a_run_without_weights_or_pairs_is_refused(script, capsys):
    assert script.main(["--checkpoint.initial_load_path="]) == 2
    assert "expected the weights to fine-tune" in capsys.readouterr().err
    config = SimpleNamespace(
        training=SimpleNamespace(dataset="python_stdlib", dataset_path=None, max_bad_records=0),
        validation=SimpleNamespace(dataset="training", dataset_path=None),
    )
    with pytest.raises(ConfigError, match="expected a corpus of pairs"):
        script._score(None, config, None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "1"], "--ranks: got 1"),
        (["--adamw_lr", "0"], "--adamw_lr: got 0"),
        (["no.toml"], "CONFIG: got 'no.toml'"),
    ],
)
def test_bad_arguments_are_told_in_one_line(script, arguments, told, capsys):
    with pytest.raises(SystemExit):
        script.main(arguments)
    assert told in capsys.readouterr().err
