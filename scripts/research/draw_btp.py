# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Draw a block under bottleneck-aware tensor parallelism: chunks, shards and collectives.

    python -m scripts.research.draw_btp --out docs/images/btp.png

The upper part shows one decoder block on two of T ranks, attention first, then the feed-forward.
The lower part shows the elements sent per token, block and pass under every plan, for the 7B model,
from the package's formulas.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.console.figures import new_figure

SHARD, LATENT, SUM, CHUNK = "#bcd4ee", "#ffd9a8", "#c0392b", "#eef1f4"
ROUND = "round,pad=0,rounding_size=0.08"
LANES = (1.55, 0.35)
"""Heights of the two ranks in a row."""


@dataclass(frozen=True)
class Part:
    """One element of a row.

    Args:
        kind: ``shard`` or ``latent`` (boxes), ``sum`` (a forward all-reduce), ``back`` (one of
            backward), ``stream`` (the residual stream).
        text: Text in the box, or beside the line.
        width: Width in the row.
    """

    kind: str
    text: str
    width: float = 1.0


ATTENTION = (
    Part("stream", "stream\nd/T", 0.8),
    Part("shard", "× γ", 0.7),
    Part("shard", "A q, k, v\n3r × d/T", 1.3),
    Part("sum", "3r\n+ Σx²", 0.75),
    Part("latent", "÷ rms\nσ", 0.85),
    Part("back", "3r", 0.55),
    Part("shard", "B q, k, v\nd/T × r", 1.3),
    Part("shard", "attention\nits heads", 1.35),
    Part("shard", "A o\nr × d/T", 1.15),
    Part("sum", "r", 0.75),
    Part("latent", "σ", 0.65),
    Part("back", "r", 0.55),
    Part("shard", "B o\nd/T × r", 1.15),
    Part("stream", "+ stream\nd/T", 0.95),
)
FEED_FORWARD = (
    Part("stream", "stream\nd/T", 0.8),
    Part("shard", "× γ", 0.7),
    Part("shard", "A gate, up\n2r × d/T", 1.3),
    Part("sum", "2r\n+ Σx²", 0.75),
    Part("latent", "÷ rms\nσ", 0.85),
    Part("back", "2r", 0.55),
    Part("shard", "B gate, up\n$d_{ff}$/T × r", 1.3),
    Part("shard", "gate · up\n$d_{ff}$/T", 1.35),
    Part("shard", "A down\nr × $d_{ff}$/T", 1.15),
    Part("sum", "r", 0.75),
    Part("latent", "σ", 0.65),
    Part("back", "r", 0.55),
    Part("shard", "B down\nd/T × r", 1.15),
    Part("stream", "+ stream\nd/T", 0.95),
)


def chunks(parts: tuple[Part, ...]) -> list[tuple[float, float]]:
    """Return the start and end of each chunk of a row: from a B to the next A."""
    spans, x, begin = [], 0.0, 0.0
    for part in parts:
        if part.kind == "sum":
            spans.append((begin, x))
        x += part.width
        if part.kind == "back":
            begin = x
    return [*spans, (begin, x)]


def draw_row(axes: Any, parts: tuple[Part, ...], title: str) -> None:
    """Draw one half of the block on two ranks."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    total = sum(part.width for part in parts)
    for begin, end in chunks(parts):
        axes.add_patch(Rectangle((begin, -0.2), end - begin, 2.3, color=CHUNK, zorder=0))
    for lane, name in zip(LANES, ("rank 0", "rank T-1"), strict=True):
        axes.text(-0.12, lane, name, ha="right", va="center", fontsize=9)
        axes.plot([0, total], [lane, lane], color="black", lw=1, zorder=1)
    axes.text(-0.12, sum(LANES) / 2, "⋮", ha="right", va="center", fontsize=11)
    x = 0.0
    for part in parts:
        middle = x + part.width / 2
        if part.kind in ("sum", "back"):
            forward = part.kind == "sum"
            line: dict[str, Any] = {"lw": 4} if forward else {"lw": 2, "ls": (0, (2, 1.5))}
            ends = [LANES[1] - 0.35, LANES[0] + 0.35]
            axes.plot([middle] * 2, ends, color=SUM, zorder=2, **line)
            axes.text(middle, -0.3, part.text, ha="center", va="top", fontsize=8, color=SUM)
        for lane in LANES if part.kind not in ("sum", "back") else ():
            color = {"shard": SHARD, "latent": LATENT, "stream": "white"}[part.kind]
            corner, size = (x + 0.06, lane - 0.3), (part.width - 0.12, 0.6)
            edge = "none" if part.kind == "stream" else "#555555"
            style: dict[str, Any] = {"boxstyle": ROUND, "facecolor": color}
            axes.add_patch(FancyBboxPatch(corner, *size, edgecolor=edge, zorder=3, **style))
            axes.text(middle, lane, part.text, ha="center", va="center", fontsize=7.5, zorder=4)
        x += part.width
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(-1.1, total + 0.1)
    axes.set_ylim(-0.95, 2.45)
    axes.set_axis_off()


def draw_volumes(axes: Any) -> None:
    """Draw the elements sent per token, in both passes, under every plan."""
    # Imported late, because torchtitan takes seconds to import and --help must be fast.
    from torchtitan_lr.formulas.tensor_parallel import part_traffic
    from torchtitan_lr.models.flavors import FLAVORS
    from torchtitan_lr.parallel.placement import TPSettings
    from torchtitan_lr.parallel.plans import PLANS

    names = {
        "megatron": "full rank (megatron)",
        "vanilla": "vanilla",
        "vanilla_replicated": "vanilla_replicated",
        "btp": "btp",
    }
    for i, (plan, name) in enumerate(reversed(names.items())):
        args = FLAVORS["cola" if PLANS[plan].low_rank else "full"]["7B"]
        rows = part_traffic(args, TPSettings(plan), tokens=1)["block"]
        passes = [[row for row in rows if row.pass_ == p] for p in ("forward", "backward")]
        forward, backward = (sum(row.elements for row in of_pass) for of_pass in passes)
        calls = [sum(row.calls for row in of_pass) for of_pass in passes]
        axes.barh(i, forward, color="#7f8c8d", label="forward" if i == 0 else None)
        axes.barh(i, backward, left=forward, color="#c7cdd1", label="backward" if i == 0 else None)
        text = f"{forward:,} + {backward:,} in {calls[0]} + {calls[1]} calls"
        axes.text(forward + backward + 800, i, text, va="center", fontsize=8)
        axes.text(-800, i, name, va="center", ha="right", fontsize=8.5)
    axes.set_xlim(0, 105_000)
    axes.set_yticks([])
    axes.tick_params(labelsize=8)
    axes.set_title("elements sent per token and block, 7B", loc="left", fontsize=10)
    axes.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def draw(path: Path) -> None:
    """Draw the figure."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = new_figure(9.2, 6.8)
    top, middle, bottom = figure.subplots(3, 1, height_ratios=[1, 1, 0.72])
    draw_row(top, ATTENTION, "attention")
    draw_row(middle, FEED_FORWARD, "feed-forward")
    draw_volumes(bottom)
    handles = [
        Patch(color=CHUNK, label="chunk: from a B to the next A"),
        Patch(facecolor=SHARD, edgecolor="#555555", label="uses this rank's shard"),
        Patch(facecolor=LATENT, edgecolor="#555555", label="r wide, the same on all ranks"),
        Line2D([], [], color=SUM, lw=4, label="all-reduce, forward"),
        Line2D([], [], color=SUM, lw=2, ls=(0, (2, 1.5)), label="all-reduce, backward"),
    ]
    figure.legend(handles=handles, loc="upper center", ncols=3, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0.02, 0, 1, 0.93))
    box = bottom.get_position()
    bottom.set_position([0.2, box.y0, box.width - (0.2 - box.x0), box.height])
    for axes in (top, middle):  # the bars' names need room at the left, the blocks do not
        box = axes.get_position()
        axes.set_position([0.01, box.y0, 0.98, box.height])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    """Draw the figure; return the exit status."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--out", default="docs/images/btp.png", help="the PNG")
    options = parser.parse_args(argv)
    if not options.out.endswith(".png"):
        parser.error(f"--out: got {options.out!r}, expected a name that ends with .png")
    draw(Path(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
