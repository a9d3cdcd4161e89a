# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The history of a run, ``metrics.jsonl``: one record per line. Reading it needs no torch."""

import json
import logging
from pathlib import Path
from typing import Any

HISTORY_FILE = "metrics.jsonl"

TRAIN_LOSS = "loss_metrics/global_avg_loss"
"""Key of a logged step: training loss, nats per token."""

INTERVAL_LOSS = "interval_loss"
"""Key of a logged step: mean of the training losses of all steps since the one before it, or since
a resume; nats per token."""

VALIDATION_LOSS = "validation_metrics/loss"
"""Key of a validation: its loss, nats per token."""

UNIGRAM_ENTROPY = "validation_metrics/unigram_entropy"
"""Key of a validation: the entropy of its tokens, nats per token."""


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the records of a ``metrics.jsonl``, oldest first; a line cut by a kill is skipped."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            logging.getLogger().warning("%s: skipping a line that was cut off: %.40s", path, line)
    return records
