# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The acceptance's results as a Markdown page."""

from collections.abc import Mapping
from typing import Any

from torchtitan_lr.console.tables import markdown_table


def as_markdown(report: dict[str, Any]) -> str:
    """Return the page of a report.

    Args:
        report: ``scale``, ``date``, ``minutes``, ``machine`` and ``parts``: results of
            `scripts.bench.acceptance.run_part` by name.
    """
    machine, parts = report["machine"], report["parts"]
    device = machine["device"] or f"{machine['cpu']}, no GPU"
    lines = [f"# Acceptance on {device}", "", f"{report['date']}, commit `{machine['commit']}`."]
    lines += [""]
    if report["scale"] != "full":
        lines += [f"A rehearsal at `{report['scale']}` size: its numbers mean nothing.", ""]
    lines += [markdown_table(["machine", ""], [[k, _cell(v)] for k, v in machine.items()]), ""]
    verdicts = [[name, _verdict(part), f"{part['seconds']:.0f}"] for name, part in parts.items()]
    lines += [markdown_table(["part", "result", "seconds"], verdicts), ""]
    for part in parts.values():
        lines += [f"## {part['title']}", "", *_part(part)]
    return "\n".join(lines).rstrip() + "\n"


def _verdict(part: dict[str, Any]) -> str:
    """Count the results of a part's jobs: ``3 passed, 1 skipped``."""
    found = [job["status"] for job in part["jobs"]]
    return ", ".join(f"{found.count(s)} {s}" for s in ("passed", "failed", "skipped") if s in found)


def _part(part: dict[str, Any]) -> list[str]:
    columns = part["columns"]
    measured = [job for job in part["jobs"] if job["values"]]
    lines: list[str] = []
    if columns and measured:
        rows = [[job["name"], *_cells(job["values"], columns)] for job in measured]
        lines += [markdown_table(["run", *columns.values()], rows), ""]
    lines += _ratios(measured)
    for job in measured:
        table = job["values"].get("table")
        if table:
            rows = [_cells(row, table["headings"]) for row in table["rows"]]
            lines += [f"`{job['name']}`", ""]
            lines += [markdown_table(list(table["headings"].values()), rows), ""]
    for job in part["jobs"]:
        if job["status"] != "passed":
            lines += [f"- {job['name']} {job['status']}: {job['reason']}"]
    if lines and lines[-1]:
        lines.append("")
    return [*lines, "```bash", *(job["command"] for job in part["jobs"]), "```", ""]


def ratios(jobs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the speed of CoLA's model over the full-rank one's, by setting.

    Args:
        jobs: Results of the part ``speed``, named ``full SETTING`` and ``cola SETTING``.
    """
    speeds = {job["name"]: job["values"].get("tokens_per_s") for job in jobs}
    found = {}
    for name, speed in speeds.items():
        model, _, setting = name.partition(" ")
        full = speeds.get(f"full {setting}")
        if model == "cola" and speed and full:
            found[setting] = speed / full
    return found


def _ratios(jobs: list[dict[str, Any]]) -> list[str]:
    found = ratios(jobs)
    if not found:
        return []
    rows = [[setting, f"{ratio:.2f}"] for setting, ratio in found.items()]
    return [markdown_table(["setting", "tokens/s, CoLA ÷ full"], rows), ""]


def _cells(values: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    return [_cell(values.get(key)) for key in columns]


def _cell(value: Any) -> str:
    """Return a value with four digits, or all of an integer part."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|")
