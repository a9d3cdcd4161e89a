# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``summary.json`` and ``curve.png``, written at the end of a run."""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_lr.training.figures import new_figure

SUMMARY_FILE = "summary.json"
CURVE_FILE = "curve.png"

TRAIN_LOSS = "loss_metrics/global_avg_loss"
"""Key in ``metrics.jsonl``: training loss, nats per token."""

VALIDATION_LOSS = "validation_metrics/loss"
"""Key in ``metrics.jsonl``: validation loss, nats per token."""

_SHARE = "data_share/"

_ENTROPY = "validation_metrics/unigram_entropy"


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
        ``steps, train_loss, val_loss, val_ppl, unigram_entropy`` (losses in nats per token),
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
    return {
        "steps": steps,
        "train_loss": train[-1][TRAIN_LOSS] if train else None,
        "val_loss": val_loss,
        "val_ppl": None if val_loss is None else _finite(perplexity(val_loss)),
        "unigram_entropy": val[-1][_ENTROPY] if val else None,
        "tokens_per_s": _median(windows, "throughput/tokens_per_s"),
        "mfu": _median(windows, "mfu(%)"),
        "peak_memory_gib": peak_memory_gib,
        "checkpoint": checkpoint,
        "curve": None,
    } | {name: share for name, share in (train[-1:] or [{}])[0].items() if _SHARE in name}


def write_summary(
    summary: dict[str, Any], history: list[dict[str, Any]], dump_folder: Path
) -> Path:
    """Write ``summary.json`` and ``curve.png`` into the dump folder; return the former."""
    curve = dump_folder / CURVE_FILE
    draw_curve(history, curve)
    path = dump_folder / SUMMARY_FILE
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(summary | {"curve": str(curve)}, indent=2) + "\n")
    scratch.replace(path)
    return path


def draw_curve(history: list[dict[str, Any]], path: Path) -> None:
    """Draw training loss, validation loss and the unigram entropy over steps.

    Args:
        history: Records of ``metrics.jsonl``.
        path: The PNG to write.
    """
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    train = _series(history, TRAIN_LOSS)
    val = _series(history, VALIDATION_LOSS)
    axes.plot(*train, color="tab:blue", linewidth=1.2, label="training loss")
    if val[0]:
        axes.plot(*val, color="tab:orange", marker="o", markersize=4, label="validation loss")
        entropy = _series(history, _ENTROPY)[1][-1]
        axes.axhline(
            entropy, color="grey", linestyle="--", label=f"unigram entropy {entropy:.2f} nats"
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def _series(history: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(r["step"], r[key]) for r in history if r.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinity


def _median(records: list[dict[str, Any]], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return median(values) if values else None
