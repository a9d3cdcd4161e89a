# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import math
from pathlib import Path
from typing import Any

from torchtitan_lr.training.figures import draw_curve
from torchtitan_lr.training.history import build_summary


def history(with_mfu: bool = False) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for step, (loss, tps) in enumerate([(8.0, 1.0), (6.0, 100.0), (5.0, 140.0), (4.5, 120.0)], 1):
        record = {
            "step": step,
            "loss_metrics/global_avg_loss": loss,
            "throughput/tokens_per_s": tps,
        }
        records.append(record | ({"mfu(%)": 10.0 * step} if with_mfu else {}))
    records.append(
        {"step": 4, "validation_metrics/loss": 4.6, "validation_metrics/unigram_entropy": 5.7}
    )
    return records


def test_takes_the_last_losses_and_the_median_speed_without_the_first_window() -> None:
    summary = build_summary(history(), 4, 1.25, "run/checkpoint/step-4")
    assert summary == {
        "steps": 4,
        "train_loss": 4.5,
        "val_loss": 4.6,
        "val_ppl": math.exp(4.6),
        "unigram_entropy": 5.7,
        "tokens_per_s": 120.0,
        "mfu": None,
        "peak_memory_gib": 1.25,
        "checkpoint": "run/checkpoint/step-4",
        "curve": None,
    }


def test_the_training_loss_is_that_of_the_last_interval() -> None:
    """Not of its last batch; of an interval with a skipped step, which has no loss, it is."""
    for mean, expected in ((5.25, 5.25), (math.nan, 4.5)):
        records = history()
        records[3] |= {"interval_loss": mean}
        assert build_summary(records, 4, 1.0, None)["train_loss"] == expected


def test_the_curve_shows_means_of_intervals_and_not_single_batches(tmp_path: Path) -> None:
    records = history()
    for record, mean in zip(records, (8.0, 7.0, 5.5, math.nan), strict=False):
        record["interval_loss"] = mean
    figure = draw_curve(records, tmp_path / "curve.png")
    thin = figure.axes[0].lines[0]
    assert list(thin.get_ydata()) == [8.0, 7.0, 5.5, 4.5]
