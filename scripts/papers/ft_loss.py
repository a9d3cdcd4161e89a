# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The validation loss of replicas that are killed again and again, beside an undisturbed run's.

    python scripts/papers/ft_loss.py --every 20 --seeds 1 2 3

Every --every steps another replica of CONFIG is killed (SIGKILL) and started again at once. Steps
in between have fewer replicas, and hence fewer tokens; the number of steps is the same. It needs
torchft.

Exit status: 0 the runs have finished, 1 one failed, 2 invalid arguments.
"""

import argparse
import json
import sys
from dataclasses import asdict

from tests.support.lighthouse import check_torchft
from torchtitan_lr.commands.parser import OneLineParser, in_one_line, new_folder


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Train with and without kills for every seed, and print a table; return the exit status."""
    options = _parse(argv)
    check_torchft()
    # Imported late: they need torch.
    from tests.support.faults.fleet import Fleet, Place, Setting
    from tests.support.faults.losses import as_table, train
    from torchtitan_lr.scaling.experiments import check_run

    folder = new_folder(options.out)
    results = []
    for seed in options.seeds:
        for every in (0, options.every):
            arguments = [
                *(f"--job.config_file={options.config}", "--checkpoint.no_enable"),
                *options.overrides,
                f"--debug.seed={seed}",
            ]
            config = check_run(arguments, 1)
            arguments.append(f"--validation.freq={config.training.steps}")
            where = [Place()] * config.fault_tolerance.group_size
            run = folder / f"seed_{seed}_every_{every}"
            fleet = Fleet(Setting(config, arguments, run, where, options.pause, patience=3600.0))
            try:
                results.append((seed, every, train(fleet, every)))
            finally:
                fleet.stop()
            rows = [{"seed": s, "every": e, **asdict(found)} for s, e, found in results]
            (folder / "ft_loss.json").write_text(json.dumps(rows, indent=1) + "\n")
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(rows, indent=1) if options.json else as_table(results))
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", nargs="?", default="debug_replicas")
    parser.add_argument("--every", type=int, default=20, help="steps from one kill to the next")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of the runs")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds added to every step")
    parser.add_argument("--out", default="outputs/ft_loss", help="folder of runs and results")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_with_overrides(argv)
    parser.check_at_least(options, every=1, pause=0)
    parser.check_toml(options.config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
