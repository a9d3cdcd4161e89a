#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Measure the effective rank of a checkpoint's activations (CoLA, section 3.1, Eq. 1).

r(alpha) is the number of singular values that hold a fraction alpha of an activation matrix's
energy. It is reported for the output of every projection of every block, for the latent input of
its B (low-rank families), and for the feed-forward's hidden units. The model reads held-out text:
the validation text of the run, or a file.

    python scripts/activation_rank.py outputs/debug_cola/checkpoint/step-150
    python scripts/activation_rank.py CHECKPOINT --alpha 0.9,0.95,0.99 --out rank.png --json

The table has r(alpha)/width for every alpha. Use more tokens than the widest activation has
columns, else the number of tokens limits the rank (the script prints a warning).
"""

import argparse
import json
import sys
from pathlib import Path

from torchtitan_lr.tools.activation_rank import as_text, draw, measure
from torchtitan_lr.tools.cli import OneLineParser, in_one_line


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = _parse(argv)
    rows = measure(options)
    print(json.dumps(rows, indent=1) if options.json else as_text(rows, options.alpha))
    if options.out:
        draw(rows, options.alpha, Path(options.out))
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path, help="a step's folder")
    parser.add_argument("--alpha", default="0.9,0.95,0.99", help="shares, with commas")
    parser.add_argument("--tokens", type=int, default=4096, help="how many to read")
    parser.add_argument("--seq_len", type=int, default=0, help="default: as in training")
    parser.add_argument("--text", type=Path, help="a file to read instead of the validation text")
    parser.add_argument("--config", type=Path, help="the run's TOML; default: its own record")
    parser.add_argument("--device", default="cpu", help="such as cuda")
    parser.add_argument("--out", default="outputs/activation_rank.png", help="the PNG, or ''")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    options = parser.parse_args(argv)
    parser.check_at_least(options, tokens=1, seq_len=0)
    try:
        options.alpha = [float(share) for share in options.alpha.split(",")]
    except ValueError:
        parser.error(f"--alpha: got {options.alpha!r}, expected numbers such as 0.9,0.95")
    if not all(0 < share <= 1 for share in options.alpha):
        parser.error(f"--alpha: got {options.alpha}, expected shares above 0 and at most 1")
    if options.text is not None and not options.text.is_file():
        parser.error(f"--text: got {str(options.text)!r}, expected a text file")
    return options


if __name__ == "__main__":
    sys.exit(main())
