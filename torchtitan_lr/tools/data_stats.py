# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run's corpora hold, and what a run of some steps would read of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

from torchtitan_lr.tools.cli import text_table

if TYPE_CHECKING:
    from torchtitan.components.tokenizer import BaseTokenizer

    from torchtitan_lr.data.corpora import Source
    from torchtitan_lr.data.mixture import MixtureSource

TOGETHER = 256
"""Documents that are tokenised together."""


def measure(config: Any, steps: int, rows: int, documents: int) -> dict[str, Any]:
    """Count the corpora of a run, and what some steps would read.

    Args:
        config: The run's checked ``JobConfig``.
        steps: Steps of the run.
        rows: Sequences of the global batch.
        documents: Documents to count in each corpus at most; 0 for all.

    Returns:
        ``corpora``, a list of results of :func:`count` with ``name``, ``part`` (``train`` or
        ``held out``) and ``whole`` (whether all of it was counted); and ``run``: ``steps``,
        ``sequences`` per step, ``tokens`` read, and of each training corpus ``share`` of the
        tokens, ``tokens`` and ``epochs`` (None where not all of it was counted).
    """
    from torchtitan_lr.data.corpora import training_source, validation_source
    from torchtitan_lr.data.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(config)
    trained = training_source(config)
    weights = _weights(trained)
    found = _count_parts(trained, tokenizer, documents)
    if config.validation.enable:
        found += _count_parts(validation_source(config), tokenizer, documents)
    # A window has one token more than its inputs, and windows do not overlap.
    tokens = steps * rows * (config.training.seq_len + 1)
    read = []
    for row, weight in zip(found, weights, strict=False):
        mine = weight * tokens
        epochs = mine / row["tokens"] if row["whole"] and row["tokens"] else None
        read.append({"name": row["name"], "share": weight, "tokens": mine, "epochs": epochs})
    run = {"steps": steps, "sequences": rows, "tokens": tokens, "corpora": read}
    return {"corpora": found, "run": run}


def count(texts: Iterator[str], tokenizer: BaseTokenizer) -> dict[str, Any]:
    """Count documents.

    Args:
        texts: The documents.
        tokenizer: Encodes them, with BOS and EOS.

    Returns:
        ``documents``, ``bytes`` (UTF-8), ``tokens``, ``bytes_per_token``, ``median`` and
        ``longest`` document in tokens, and ``histogram``: documents by the power of two of tokens
        below which they are.
    """
    from torchtitan_lr.data.encoding import encode_documents

    lengths: list[int] = []
    size = 0
    while batch := list(islice(texts, TOGETHER)):
        size += sum(len(text.encode("utf-8", errors="replace")) for text in batch)
        lengths += [len(tokens) for tokens in encode_documents(tokenizer, batch)]
    powers = Counter(1 << length.bit_length() for length in lengths)
    return {
        "documents": len(lengths),
        "bytes": size,
        "tokens": sum(lengths),
        "bytes_per_token": size / sum(lengths) if lengths else None,
        "median": median(lengths) if lengths else None,
        "longest": max(lengths, default=None),
        "histogram": {str(power): powers[power] for power in sorted(powers)},
    }


def as_text(report: dict[str, Any]) -> str:
    """Return the result of :func:`measure` as tables."""
    header = ["corpus", "documents", "tokens", "MB", "bytes/token", "median", "longest"]
    rows = []
    for row in report["corpora"]:
        more = "" if row["whole"] else " (not all)"
        numbers = [f"{row['documents']:,}", f"{row['tokens']:,}", f"{row['bytes'] / 1e6:,.2f}"]
        numbers += [
            _number(row["bytes_per_token"]),
            _number(row["median"]),
            _number(row["longest"]),
        ]
        rows.append([f"{row['name']}, {row['part']}{more}", *numbers])
    parts = [text_table(header, rows)]
    for row in report["corpora"]:
        most = max(row["histogram"].values(), default=1)
        bars = [
            [f"< {int(power):,}", "#" * max(1, round(40 * n / most)), f"{n:,}"]
            for power, n in row["histogram"].items()
        ]
        title = f"tokens per document: {row['name']}, {row['part']}"
        parts.append(f"{title}\n{text_table(['tokens', '', 'documents'], bars, left=2)}")
    run = report["run"]
    lines = [f"{run['steps']:,} steps of {run['sequences']:,} sequences: {run['tokens']:,} tokens"]
    for row in run["corpora"]:
        epochs = "an unknown number of" if row["epochs"] is None else f"{row['epochs']:.3g}"
        tokens = f"{row['tokens']:,.0f} tokens"
        lines.append(f"  {row['name']}: {tokens} ({row['share']:.1%}), {epochs} epochs")
    return "\n\n".join([*parts, "\n".join(lines)])


def _weights(source: Source | MixtureSource) -> list[float]:
    return list(getattr(source, "weights", [1.0]))


def _count_parts(
    source: Source | MixtureSource, tokenizer: BaseTokenizer, documents: int
) -> list[dict[str, Any]]:
    names: tuple[str, ...] = getattr(source, "names", (source.name,))
    parts: tuple[Any, ...] = getattr(source, "parts", (source,))
    rows = []
    for name, part in zip(names, parts, strict=True):
        texts = iter(part.open())
        found = count(islice(texts, documents or None), tokenizer)
        whole = not documents or next(texts, None) is None
        kind = "train" if part.split == "train" else "held out"
        rows.append({"name": name, "part": kind, "whole": whole} | found)
    return rows


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
