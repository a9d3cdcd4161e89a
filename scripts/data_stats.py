#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Count a run's corpora: documents, tokens, bytes per token, lengths, and what a run would see.

    python scripts/data_stats.py train_configs/debug_cola.toml
    python scripts/data_stats.py CONFIG --steps 10000 --world 64 --json [--section.key=value ...]
    python scripts/data_stats.py CONFIG --documents 10000

Training and held-out parts are counted with the run's tokenizer, each corpus of a mixture by
itself.
--documents counts only so many of each, for a stream or a large corpus; epochs are then unknown.

Exit status: 0, or 2 for an invalid configuration or corpus.
"""

import argparse
import json
import sys

from torchtitan_lr.tools.cli import OneLineParser, in_one_line
from torchtitan_lr.tools.data_stats import as_text, measure


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Print the counts; returns the exit status."""
    options = _parse(argv)
    from torchtitan_lr.checks.values import data_parallel_degree  # late: --help needs no torch
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.data.checks import check_corpus

    config = build_job_config([f"--job.config_file={options.config}", *options.overrides])
    check_corpus(config)
    rows = config.training.global_batch_size
    if rows < 0:
        rows = config.training.local_batch_size * data_parallel_degree(config, options.world)
    report = measure(config, options.steps or config.training.steps, rows, options.documents)
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", help="a TOML file of ./run_llama_train.sh")
    parser.add_argument("--steps", type=int, default=0, help="default: training.steps")
    parser.add_argument("--world", type=int, default=4, help="ranks, for a batch by rank")
    parser.add_argument("--documents", type=int, default=0, help="of each corpus; default: all")
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    options = parser.parse_with_overrides(argv)
    parser.check_toml(options.config, "CONFIG")
    parser.check_at_least(options, steps=0, world=1, documents=0)
    return options


if __name__ == "__main__":
    sys.exit(main())
