# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Train a few steps under several plans and compare their cost.

With one CONFIG, three runs are derived from it: full rank (Megatron's plan), and the low-rank model
under the vanilla plan and under the bottleneck-aware plan. With several CONFIGs, each runs
unchanged. The runs execute one after another on NGPU ranks of this machine (default: its GPUs, at
most 4, or 4 CPU processes without GPUs). Further arguments, --section.key=value, apply to all runs.

All runs use the same mode of activation checkpointing, which the results name: the TOML's, or
"full" if that is "low_rank" and a full-rank run, which does not support it, is included. Several
CONFIGs with different modes are an error. --checkpointing sets another mode for single runs.

    python scripts/compare.py train_configs/debug_cola.toml
    NGPU=4 python scripts/compare.py A.toml B.toml --steps 20 --training.seq_len=256
    python scripts/compare.py train_configs/debug_cola.toml --checkpointing full=full,btp=low_rank
    python scripts/compare.py --tables       # BOOST's Figure 6 (left), on all available GPUs

The table has the median seconds per step and their range, tokens per second of all ranks, MFU from
the model's own FLOPs (- if the device's peak is unknown), bytes of all collectives per step
(elements once per call times item size, rank 0), the time in which collectives ran (mean over the
ranks, including waiting; computation may overlap), and the largest rank's peak memory. Bytes and
communication time are measured in two additional steps at the end, which are not timed. The table
is printed; compare.json and compare.png are written to --work.

Exit status: 0 all runs finished, 1 a run failed, 2 invalid arguments or configuration.
"""

import argparse
import json
import sys
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.errors import ConfigError, RunFailedError
from torchtitan_lr.scaling.compare import arguments_of, cases_of, measure
from torchtitan_lr.scaling.experiments import check_run, on_signals_stop
from torchtitan_lr.scaling.timing import as_text, draw
from torchtitan_lr.scaling.variants import PLANS, read_plans


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Check all runs, execute them, and print the table; return the exit status."""
    options = _parse(argv)
    cases = cases_of(options)
    for case in cases:
        arguments = [f"--job.config_file={case.config}", *arguments_of(case, options)]
        check_run(arguments, case.ranks)
    if not cases:
        print("skipped: no run of --tables fits this machine")
        return 0
    on_signals_stop()
    rows, failed = [], 0
    for case in cases:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        try:
            rows.append(measure(case, options))
        except RunFailedError as error:
            failed += 1
            print(f"{case.name}: {error}", file=sys.stderr)
    if rows:
        work = Path(options.work)
        (work / "compare.json").write_text(json.dumps(rows, indent=1) + "\n")
        draw(rows, work / "compare.png")
        print(json.dumps(rows, indent=1) if options.json else as_text(rows))
    return 1 if failed else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("configs", metavar="CONFIG", nargs="*", help="TOML files")
    parser.add_argument("--steps", type=int, default=10, help="steps to time")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument(
        "--plans",
        default="full,vanilla,btp",
        help=f"with one CONFIG: some of {','.join(PLANS)}",
    )
    parser.add_argument(
        "--checkpointing",
        default="",
        metavar="RUN=MODE,...",
        help="modes of activation checkpointing of single runs (default: one mode for all)",
    )
    parser.add_argument("--tables", action="store_true", help="the paper's runs; takes no CONFIG")
    parser.add_argument(
        *("--out", "--work"),
        dest="work",
        default="outputs/compare",
        help="folder of runs and results",
    )
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    options = parser.parse_with_overrides(argv)
    parser.check_at_least(options, steps=1, warmup=0)
    config = options.configs[0] if len(options.configs) == 1 else None
    try:
        options.plans = read_plans(options.plans, config, options.overrides)
    except ConfigError as error:
        parser.error(str(error))
    if options.tables and options.configs:
        parser.error(f"--tables: got CONFIG {options.configs[0]!r} too, expected none")
    if not options.tables and not options.configs:
        parser.error(
            "CONFIG: got nothing, expected a TOML file such as train_configs/debug_cola.toml"
        )
    for config in options.configs:
        parser.check_toml(config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
