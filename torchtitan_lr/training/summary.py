# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``summary.json`` and ``curve.png``, written at the end of a run."""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_lr.training.figures import draw_curve
from torchtitan_lr.training.history import (
    INTERVAL_LOSS,
    TRAIN_LOSS,
    UNIGRAM_ENTROPY,
    VALIDATION_LOSS,
)

SUMMARY_FILE = "summary.json"
CURVE_FILE = "curve.png"


def build_summary(
    history: list[dict[str, Any]], steps: int, peak_memory_gib: float, checkpoint: str | None
) -> dict[str, Any]:
    """Summarise a run's history.

    Args:
        history: Records of ``metrics.jsonl``.
        steps: Number of finished training steps.
        peak_memory_gib: Largest rank's peak, GiB.
        checkpoint: Folder of the newest checkpoint.

    Returns:
        ``steps, train_loss, val_loss, val_ppl, unigram_entropy`` (losses in nats per token; that
        of training is the mean of the steps since the last record but one),
        ``tokens_per_s`` (all ranks together, the median over logged windows without the first),
        ``mfu`` (percent; None if the device's peak is unknown), ``peak_memory_gib,
        checkpoint`` and ``curve`` (filled in by `write_summary`); of a mixture also
        ``data_share/<name>``, the share of each corpus in what was read.
    """
    # Imported late: the launcher reads a summary without torch.
    from torchtitan_lr.models.loss import perplexity

    train = [record for record in history if TRAIN_LOSS in record]
    val = [record for record in history if VALIDATION_LOSS in record]
    windows = train[1:] or train  # the first window includes warm-up and compilation
    val_loss = val[-1][VALIDATION_LOSS] if val else None
    loss = train[-1][TRAIN_LOSS] if train else None
    mean = train[-1].get(INTERVAL_LOSS) if train else None
    if mean is not None and math.isfinite(mean):  # a skipped step has no loss
        loss = mean

    def middle(key: str) -> float | None:
        values = [record[key] for record in windows if record.get(key) is not None]
        return median(values) if values else None

    ppl = math.inf if val_loss is None else perplexity(val_loss)
    return (
        {
            "steps": steps,
            "train_loss": loss,
            "val_loss": val_loss,
            "val_ppl": ppl if math.isfinite(ppl) else None,  # JSON has no infinity
            "unigram_entropy": val[-1][UNIGRAM_ENTROPY] if val else None,
            "tokens_per_s": middle("throughput/tokens_per_s"),
            "mfu": middle("mfu(%)"),
            "peak_memory_gib": peak_memory_gib,
            "checkpoint": checkpoint,
            "curve": None,
        }
        | {name: share for name, share in (train[-1:] or [{}])[0].items() if "data_share/" in name}
    )


def write_summary(
    summary: dict[str, Any], history: list[dict[str, Any]], dump_folder: Path, title: str = ""
) -> Path:
    """Write ``summary.json`` and ``curve.png`` into the dump folder; return the former.

    Args:
        summary: Result of `build_summary`.
        history: Records of ``metrics.jsonl``.
        dump_folder: ``job.dump_folder``.
        title: The curve's title.
    """
    curve = dump_folder / CURVE_FILE
    draw_curve(history, curve, title)
    path = dump_folder / SUMMARY_FILE
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(summary | {"curve": str(curve)}, indent=2) + "\n")
    scratch.replace(path)
    return path
