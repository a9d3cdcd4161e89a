# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The shipped configurations in a table. This file does not import torch."""

from typing import Any

from torchtitan_lr.config.parse import load_toml
from torchtitan_lr.config.schema import Model
from torchtitan_lr.config.shipped import shipped_configs
from torchtitan_lr.console.tables import text_table

_DEGREES = (
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "data_parallel_replicate_degree",
)


def list_configs() -> list[dict[str, Any]]:
    """Return one row per shipped configuration.

    Returns:
        ``name``, ``model``, ``flavor``, ``optimizer``, ``ranks`` (the product of the degrees
        without FSDP's free one), ``steps`` and ``description``.
    """
    rows = []
    for name, path in shipped_configs().items():
        toml = load_toml(str(path))
        model, layout = toml.get("model", {}), toml.get("parallelism", {})
        ranks = max(1, layout.get("data_parallel_shard_degree", 1))
        for degree in _DEGREES:
            ranks *= layout.get(degree, 1)
        rows.append(
            {
                "name": name,
                "model": model.get("name", Model.name),
                "flavor": model.get("flavor", Model.flavor),
                "optimizer": toml.get("optimizer", {}).get("name", "AdamW"),
                "ranks": ranks,
                "steps": toml.get("training", {}).get("steps"),
                "description": toml.get("job", {}).get("description", ""),
            }
        )
    return rows


def list_as_text(rows: list[dict[str, Any]]) -> str:
    """Format the rows of `list_configs` as a table."""
    header = ("name", "model", "flavor", "ranks", "steps", "description")
    lines = []
    for row in rows:
        ranks, steps = str(row["ranks"]), "-" if row["steps"] is None else f"{row['steps']:,}"
        shown = [row["name"], row["model"], row["flavor"], ranks, steps, row["description"]]
        lines.append(shown)
    widths = [max(len(line[i]) for line in [header, *lines]) for i in (3, 4)]
    for line in lines:
        line[3], line[4] = line[3].rjust(widths[0]), line[4].rjust(widths[1])
    return text_table(header, lines, left=len(header))
