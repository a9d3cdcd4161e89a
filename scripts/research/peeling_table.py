# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Peeling success of a count sketch over the density of all ranks' entries.

Each of W ranks sends the largest entries of an independent random gradient. This is the worst case,
because similar gradients overlap. The table tests TAGC's published levels on 2, 4 and 8 ranks; the
curves vary the sparsity. All ranks run in one process and use the real codec.

    python -m scripts.research.peeling_table --out docs/images/tagc_peeling.png
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.compression.sizes import LEVELS, PEELING_LIMIT, peels, smallest_theta
from torchtitan_lr.console.figures import TEXT, finish, new_figure
from torchtitan_lr.console.tables import text_table

RANKS = (2, 4, 8)


def peeled(ranks: int, c: float, theta: float, entries: int, seed: int) -> dict[str, float]:
    """Send one random gradient of every rank to one owner through the codec.

    Args:
        ranks: Number of ranks W.
        c: Compression of the sketch.
        theta: Sparsity.
        entries: Entries m of the owner.
        seed: Seed of the gradients and of the hash functions.

    Returns:
        ``density`` of the union, ``load`` c·density, ``peeled`` share of the sent entries.
    """
    import torch  # imported late: --help does not need it

    from torchtitan_lr.compression.codecs import SketchCodec

    generator = torch.Generator().manual_seed(seed)
    codec = SketchCodec(ranks, c, theta, rounds=48)
    gradients = [torch.randn(1, entries, generator=generator) for _ in range(ranks)]
    messages = [codec.encode(gradient, seed) for gradient in gradients]
    received = {
        name: torch.cat([x.swapped[name] for x in messages]) for name in messages[0].swapped
    }
    received |= {n: torch.cat([x.summed[n] for x in messages]).sum(0) for n in messages[0].summed}
    counts = codec.decode(received, entries, seed).counts
    indexed, stuck = int(counts["indexed"]), int(counts["unpeeled"])
    density = indexed / entries
    return {"density": density, "load": c * density, "peeled": 1 - stuck / max(1, indexed)}


def level_table(entries: int, trials: int) -> list[dict[str, Any]]:
    """Test every published level, and the smallest θ that decodes, on every number of ranks."""
    rows = []
    for ranks in RANKS:
        for level, (c, published) in LEVELS.items():
            for theta in sorted({published, max(published, smallest_theta(c, ranks))}):
                results = [peeled(ranks, c, theta, entries, seed) for seed in range(trials)]
                rows.append(
                    {
                        "ranks": ranks,
                        "level": level,
                        "theta": theta,
                        "published": theta == published,
                        "load": c * (1 - theta**ranks),
                        "accepted": peels(c, theta, ranks),
                        "whole": sum(r["peeled"] == 1 for r in results) / trials,
                        "peeled": sum(r["peeled"] for r in results) / trials,
                    }
                )
    return rows


def load_curves(entries: int, trials: int) -> dict[int, list[dict[str, float]]]:
    """Vary c·density from 0.6 to 2.4 at c = 10, on every number of ranks; closely up to 1."""
    curves: dict[int, list[dict[str, float]]] = {}
    for ranks in RANKS:
        curves[ranks] = []
        for load in (*(0.6 + 0.02 * step for step in range(21)), 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4):
            theta = (1 - load / 10) ** (1 / ranks)
            results = [peeled(ranks, 10, theta, entries, seed) for seed in range(trials)]
            mean = {key: sum(r[key] for r in results) / trials for key in ("load", "peeled")}
            whole = sum(r["peeled"] == 1 for r in results) / trials
            curves[ranks].append(mean | {"whole": whole})
    return curves


def as_text(rows: list[dict[str, Any]]) -> str:
    """Format the table; ``whole`` is the share of trials in which everything peeled."""
    header = [
        "level",
        "config",
        "ranks",
        "theta",
        "c*(1-theta^W)",
        "peeled entries",
        "whole trials",
    ]
    lines = []
    for row in rows:
        name = row["level"] if row["published"] else "raised"
        verdict = "accepted" if row["accepted"] else "refused"
        numbers = [str(row["ranks"]), f"{row['theta']:.4f}", f"{row['load']:.3f}"]
        numbers += [f"{100 * row['peeled']:.2f}%", f"{100 * row['whole']:.0f}%"]
        lines.append([name, verdict, *numbers])
    return text_table(header, lines, left=2)


def draw(curves: dict[int, list[dict[str, float]]], rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the curves and mark the published levels."""
    figure = new_figure()
    axes = figure.subplots()
    for ranks, points in curves.items():
        loads = [point["load"] for point in points]
        (line,) = axes.plot(loads, [p["peeled"] for p in points], label=f"{ranks} ranks: entries")
        axes.plot(loads, [p["whole"] for p in points], ":", color=line.get_color())
        for row in rows:
            if row["ranks"] == ranks and row["published"]:
                at = (row["load"], row["peeled"])
                axes.plot(*at, "o", color=line.get_color(), ms=5)
                # Only on 2 ranks are two levels close to each other.
                beside = {"2x": -7, "4x": 9}.get(row["level"], 2) if ranks == 2 else 2
                place = (beside, 7)
                style = {"textcoords": "offset points", "fontsize": TEXT, "color": line.get_color()}
                axes.annotate(row["level"], at, place, ha="center", **style)
    axes.axvline(PEELING_LIMIT, color="grey", lw=0.8, ls="--", label="limit of the check")
    axes.set_xlabel("c · density of the union")
    axes.set_ylim(-0.06, 1.14)
    axes.set_ylabel("share peeled (dotted: whole trials)")
    axes.grid(alpha=0.3)
    title = "TAGC: what a sketch of all ranks' entries recovers\ncircles: the published levels"
    finish(figure, path, title)


def main(argv: list[str] | None = None) -> int:
    """Return 1 if a setting that the configuration check accepts failed in most trials, else 0."""
    options = _parse(argv)
    rows = level_table(options.entries, options.trials)
    print(json.dumps(rows, indent=1) if options.json else as_text(rows))
    if options.out:
        draw(load_curves(options.entries, options.trials), rows, Path(options.out))
    return 1 if any(row["accepted"] and row["whole"] < 0.5 for row in rows) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=200_000, help="entries of one owner")
    parser.add_argument("--trials", type=int, default=10, help="gradients of every row")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    parser.add_argument("--out", default="", help="the PNG; none by default")
    options = parser.parse_args(argv)
    for name, least in (("entries", 100), ("trials", 1)):
        got = getattr(options, name)
        if not least <= got < math.inf:
            parser.error(f"--{name}: got {got}, expected at least {least}")
    return options


if __name__ == "__main__":
    sys.exit(main())
