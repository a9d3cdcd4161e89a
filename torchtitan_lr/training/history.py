# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A run's history ``metrics.jsonl``, its summary; torch is not needed."""

import json
import logging
import math
import os
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_lr.config.files import parse_json, read_regular

HISTORY_FILE = "metrics.jsonl"

# Keys of a logged step; losses are in nats per token.
TRAIN_LOSS = "loss_metrics/global_avg_loss"
INTERVAL_LOSS = "interval_loss"  # mean of the steps since the one before it, or since a resume
TRAIN_COMMON = "loss_metrics/of_common_weights"  # with outer steps: 0 if of replicas' own ones
TOKENS_SEEN = "n_tokens_seen"  # of all ranks since the run's first step
RATE = "lr"
TOKENS_PER_S = "throughput/tokens_per_s"  # of all ranks together
SLOWEST_RANK = "time_metrics/slowest_rank"  # by its blocks' forward, see `watch.Watch`
SLOWEST_BEHIND = "time_metrics/slowest_behind(%)"  # the median rank
MFU = "mfu(%)"  # missing where the device's peak is unknown
COMM_BYTES = "comm_bytes/"  # before a mesh dimension: bytes of rank 0's collectives

# Keys of a validation.
VALIDATION = "validation_metrics/"  # a set of ``validation.sets`` has its name and "/" after it
VALIDATION_LOSS = f"{VALIDATION}loss"
VALIDATION_COMMON = f"{VALIDATION}of_common_weights"  # as in training
UNIGRAM_ENTROPY = f"{VALIDATION}unigram_entropy"  # of its tokens, nats per token

SUMMARY_FILE = "summary.json"


def append_record(path: Path, metrics: dict[str, Any], step: int) -> None:
    """Append a record to a ``metrics.jsonl``; NaN and infinity, which JSON has not, become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in metrics.items() if not isinstance(v, float) or math.isfinite(v)}
    record = {"step": step} | dict.fromkeys(metrics) | kept
    with path.open("ab+") as file:
        # A kill or a full disk may have cut off the line before it.
        if (size := file.seek(0, os.SEEK_END)) > 0:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(f"{json.dumps(record)}\n".encode())


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
            numbers = all(is_number(value) for value in record.values() if value is not None)
            if type(record["step"]) is not int or not numbers:
                raise ValueError("step")
        except (ValueError, KeyError):
            logging.getLogger().warning("%s: skipping a damaged line: %.40r", path, line)
            continue
        records.append(record)
    return records


def is_number(value: object) -> bool:
    """Return whether a value of JSON is a finite number of a size that occurs."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 2**63


def train_loss(record: dict[str, Any]) -> float | None:
    """Return a logged step's loss, a mean since the one before; None for a validation."""
    loss: float | None = record.get(INTERVAL_LOSS if has_mean(record) else TRAIN_LOSS)
    return loss


def has_mean(record: dict[str, Any]) -> bool:
    """Return whether a logged step has a mean since the one before: a skipped step has no loss."""
    mean = record.get(INTERVAL_LOSS)
    return mean is not None and math.isfinite(mean)


def set_losses(history: list[dict[str, Any]]) -> dict[str, str]:
    """Return the keys of the losses of validation sets, in the order of their names' appearance."""
    found = {}
    for record in history:
        for key in record:
            if key.startswith(VALIDATION) and key.endswith("/loss") and key != VALIDATION_LOSS:
                found[key.removeprefix(VALIDATION).removesuffix("/loss")] = key
    return found


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
        "val_losses": {name: val[-1].get(key) for name, key in set_losses(val).items()},
        "val_ppl": ppl if math.isfinite(ppl) else None,  # JSON has no infinity
        "unigram_entropy": val[-1].get(UNIGRAM_ENTROPY) if val else None,
        "tokens_per_s": median_of(TOKENS_PER_S),
        "mfu": median_of(MFU),
        "peak_memory_gib": peak_memory_gib,
        "checkpoint": checkpoint,
        "curve": None,
    }
