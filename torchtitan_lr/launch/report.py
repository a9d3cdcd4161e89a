# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The summary of a run, as the launcher prints it."""

from pathlib import Path
from typing import Any

from torchtitan_lr.config.files import read_json
from torchtitan_lr.errors import escaped
from torchtitan_lr.training.history import SUMMARY_FILE, is_number


def read_summary(dump_folder: Path, newer_than: float) -> dict[str, Any] | None:
    """Return the keys of ``summary.json``; None for one from before a time, of another run."""
    path = dump_folder / SUMMARY_FILE
    try:
        return read_json(path) if path.stat().st_mtime >= newer_than else None
    except (OSError, ValueError):  # there is none, or it is damaged
        return None


def summary_lines(summary: dict[str, Any], dump_folder: Path, log_folder: Path) -> list[str]:
    """Format a summary for the console."""

    def number(key: str, form: str, unit: str = "") -> str:
        value = summary.get(key)
        if not is_number(value) or (form == "d" and not isinstance(value, int)):
            return "-"  # unknown, or the file is damaged
        return format(value, form) + unit

    sent: list[tuple[str, str]] = []
    if all(is_number(summary.get(key)) for key in ("sent_bytes", "adamw_bytes")):
        own, adamw = (f"{summary[key] / 1e6:.1f}" for key in ("sent_bytes", "adamw_bytes"))
        sent.append(("gradients sent", f"{own} MB per step by formula (AdamW {adamw})"))
    rows = (
        ("steps", number("steps", "d")),
        ("train loss", number("train_loss", ".4f", " nats/token")),
        ("validation loss", number("val_loss", ".4f", " nats/token")),
        ("unigram entropy", number("unigram_entropy", ".4f", " nats/token (validation tokens)")),
        ("validation perplexity", number("val_ppl", ".2f")),
        ("tokens/s", number("tokens_per_s", ",.0f", " (all ranks)")),
        ("MFU", number("mfu", ".2f", " %") if summary.get("mfu") is not None else "unknown peak"),
        ("peak memory", number("peak_memory_gib", ".2f", " GiB (largest rank)")),
        *sent,
        ("checkpoint", summary.get("checkpoint") or "none"),
        ("curve", summary.get("curve") or "none"),
        ("summary", dump_folder / SUMMARY_FILE),
        ("logs", log_folder),
    )
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {escaped(str(value))}" for name, value in rows]
