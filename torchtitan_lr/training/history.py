# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A run's history ``metrics.jsonl``, its summary and its curve; torch is not needed."""

import logging
import math
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_lr.config.files import parse_json, read_regular
from torchtitan_lr.console.figures import (
    DOTS,
    THICK,
    THIN,
    finish,
    new_figure,
    series,
    smoothed,
)

HISTORY_FILE = "metrics.jsonl"

TRAIN_LOSS = "loss_metrics/global_avg_loss"  # key of a logged step: training loss, nats per token

INTERVAL_LOSS = "interval_loss"
"""Key of a logged step: mean of the training losses of all steps since the one before it, or since
a resume; nats per token."""

VALIDATION_LOSS = "validation_metrics/loss"  # key of a validation: its loss, nats per token

UNIGRAM_ENTROPY = "validation_metrics/unigram_entropy"
"""Key of a validation: the entropy of its tokens, nats per token."""

VALIDATION_SECONDS = "validation_metrics/seconds"  # key of a validation: its seconds

TOKENS_SEEN = "n_tokens_seen"
"""Key of a logged step: tokens of all ranks since the run's first step."""

RATE = "lr"  # key of a logged step: its learning rate

STEP_SECONDS = "time_metrics/end_to_end(s)"
"""Key of a logged step: mean seconds per step since the one before it."""

TOKENS_PER_S = "throughput/tokens_per_s"
"""Key of a logged step: tokens per second of all ranks together."""

TOKENS_PER_S_PER_DEVICE = f"{TOKENS_PER_S}_per_device"
"""Key of a logged step: tokens per second of one rank."""

MFU = "mfu(%)"  # key of a logged step: percent of the device's peak; missing where that is unknown

COMM_BYTES = "comm_bytes/"
"""Before a mesh dimension, the key of a logged step: bytes of rank 0's collectives."""

SUMMARY_FILE = "summary.json"
CURVE_FILE = "curve.png"

_TRAIN, _VALIDATION, _RATE = "tab:blue", "tab:orange", "tab:green"

_NUMBERS = (
    *(TRAIN_LOSS, INTERVAL_LOSS, VALIDATION_LOSS, UNIGRAM_ENTROPY, TOKENS_SEEN, RATE, MFU),
    *(STEP_SECONDS, TOKENS_PER_S, TOKENS_PER_S_PER_DEVICE),
)
"""Keys that are read as numbers."""


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the records of a ``metrics.jsonl``, oldest first; damage costs only itself."""
    try:
        lines = read_regular(path).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        logging.getLogger().warning("%s: skipping it (%s)", path, error.strerror)
        return []
    records = []
    for line in filter(bytes.strip, lines):
        try:
            record = parse_json(line.decode())
            if type(record["step"]) is not int or not is_number(record["step"]):
                raise ValueError("step")
        except (ValueError, KeyError):
            logging.getLogger().warning("%s: skipping a damaged line: %.40r", path, line)
            continue
        for key in _NUMBERS:
            if record.get(key) is not None and not is_number(record[key]):
                del record[key]
        records.append(record)
    return records


def is_number(value: object) -> bool:
    """Return whether a value of JSON is a finite number of a size that occurs."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63


def train_loss(record: dict[str, Any]) -> float | None:
    """Return a logged step's loss, a mean since the one before; None for a validation."""
    loss, mean = record.get(TRAIN_LOSS), record.get(INTERVAL_LOSS)
    if mean is not None and math.isfinite(mean):  # a skipped step has no loss
        return mean
    return loss


def perplexity(loss: float) -> float:
    """Return e to the loss (nats per token); infinity where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def build_summary(
    history: list[dict[str, Any]], steps: int, peak_memory_gib: float, checkpoint: str | None
) -> dict[str, Any]:
    """Summarise the records of a run's ``metrics.jsonl``.

    Losses are in nats per token; ``tokens_per_s`` is of all ranks, the median over logged windows
    without the first; ``mfu`` in percent.
    """
    train = [record for record in history if TRAIN_LOSS in record]
    val = [record for record in history if VALIDATION_LOSS in record]
    windows = train[1:] or train  # the first window includes warm-up and compilation
    val_loss = val[-1][VALIDATION_LOSS] if val else None
    last = train[-1] if train else {}

    def median_of(key: str) -> float | None:
        values = [record[key] for record in windows if record.get(key) is not None]
        return median(values) if values else None

    ppl = math.inf if val_loss is None else perplexity(val_loss)
    return {
        "steps": steps,
        "train_loss": train_loss(last),
        "val_loss": val_loss,
        "val_ppl": ppl if math.isfinite(ppl) else None,  # JSON has no infinity
        "unigram_entropy": val[-1].get(UNIGRAM_ENTROPY) if val else None,
        "tokens_per_s": median_of(TOKENS_PER_S),
        "mfu": median_of(MFU),
        "peak_memory_gib": peak_memory_gib,
        "checkpoint": checkpoint,
        "curve": None,
        **{name: share for name, share in last.items() if "data_share/" in name},
    }


def tokens_per_step(history: list[dict[str, Any]]) -> float:
    """Return the mean tokens per step of all ranks, 0 if they are not in the history."""
    steps, tokens = series(history, TOKENS_SEEN)
    return tokens[-1] / steps[-1] if steps and steps[-1] else 0.0


def finish_axes(axes: Any, history: list[dict[str, Any]]) -> None:
    """Label the axis of steps, and add one of tokens above if their number is known."""
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    rate = tokens_per_step(history)
    if not rate:
        return
    from matplotlib.ticker import EngFormatter

    above = axes.secondary_xaxis("top", functions=(lambda x: x * rate, lambda x: x / rate))
    above.xaxis.set_major_formatter(EngFormatter(sep=""))
    above.set_xlabel("tokens")


def draw_losses(
    axes: Any, history: list[dict[str, Any]], color: str, dots: str, name: str, dots_name: str
) -> None:
    """Draw a run's training loss, each logged mean and smoothed, and its validation as dots."""
    known = [record for record in history if train_loss(record) is not None]
    steps, losses = series([r | {TRAIN_LOSS: train_loss(r)} for r in known], TRAIN_LOSS)
    axes.plot(steps, losses, color=color, **THIN)
    axes.plot(steps, smoothed(losses), color=color, label=name, **THICK)
    validation = series(history, VALIDATION_LOSS)
    if validation[0]:
        axes.plot(*validation, color=dots, label=dots_name or None, **DOTS)
    axes.set_ylabel("loss (nats per token)")


def draw_curve(history: list[dict[str, Any]], path: Path, title: str = "") -> Any:
    """Draw losses, unigram entropy and learning rate over steps and tokens into a PNG."""
    figure = new_figure()
    axes = figure.add_subplot()
    names = "training loss (thin: means of logged intervals)", "validation loss"
    draw_losses(axes, history, _TRAIN, _VALIDATION, *names)
    if entropies := series(history, UNIGRAM_ENTROPY)[1]:
        label = f"unigram entropy {entropies[-1]:.2f} nats"
        axes.axhline(entropies[-1], color="grey", linestyle="--", label=label)
    finish_axes(axes, history)
    rates = series(history, RATE)
    if rates[0]:
        right = axes.twinx()
        right.plot(*rates, color=_RATE, linewidth=0.8, alpha=0.7, label="learning rate")
        right.set_ylabel("learning rate", color=_RATE)
        right.set_ylim(bottom=0)
        right.yaxis.set_major_formatter("{x:g}")
    finish(figure, path, title)
    return figure
