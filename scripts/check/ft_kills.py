# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Strike replicas that come and go at every point of a step, and check what they have computed.

    python scripts/check/ft_kills.py
    python scripts/check/ft_kills.py debug_replicas --parts quorum --repeats 3
    python scripts/check/ft_kills.py --parts network          # needs root and iproute2

A quorum server and the replicas of CONFIG run on this machine. One fault follows another; between
them all replicas take part again. --parts are

    kill      SIGKILL before and in every collective of a plain and of a refresh step, before and
              after the vote; the replica is started again
    stop      SIGSTOP at the same points; the replica is woken once the others have gone on
    two       both signals to two replicas at one point
    newcomer  both signals to a newcomer in its heal and its comparison, and to a member then
    quorum    the quorum server is killed and started again; a heal that is slower than a step
    network   the last replica is behind a link that loses every packet, then is slowed

Then the logs are checked: after every committed step all replicas had the same bits, no step is
missing, no data were used twice, and one process that takes the same micro-batches has the same
losses. It needs torchft.

Exit status: 0 all checks passed, 1 one failed or a replica failed, 2 invalid arguments.
"""

import argparse
import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.lighthouse import check_torchft
from torchtitan_lr.commands.parser import OneLineParser, in_one_line, new_folder

PARTS = ("kill", "stop", "two", "newcomer", "quorum", "network")

SMALL = [
    *("--training.seq_len=32", "--training.local_batch_size=1", "--validation.no_enable"),
    *("--checkpoint.no_enable", "--training.steps=100000", "--lr_scheduler.warmup_steps=1"),
    *("--optimizer.lr=1e-4", "--optimizer.tsr_refresh_interval=8"),
    *("--optimizer.tsr_embedding_refresh_interval=8", "--fault_tolerance.digests"),
    "--fault_tolerance.process_group_timeout_ms=4000",
]
"""Short steps; a low rate, at which rounding grows little in a thousand steps."""


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the parts, check them, and print a table; return the exit status."""
    options = _parse(argv)
    check_torchft()
    # Imported late: they need torch.
    from tests.support.faults.verdict import as_json, summary
    from torchtitan_lr.scaling.experiments import check_run

    arguments = [f"--job.config_file={options.config}", *SMALL, *options.overrides]
    config = check_run(arguments, 1)
    folder = new_folder(options.out)
    # Exit through the end of every part: namespaces outlive their process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed, results = False, {}
    for part in options.parts:
        outcomes, verdict = _run(part, options, config, arguments, folder / part)
        failed = failed or not verdict.holds
        results[part] = as_json(outcomes, verdict)
        if not options.json:
            print(f"{part}\n{summary(outcomes)}\n{verdict}\n", flush=True)
        (folder / "ft_kills.json").write_text(json.dumps(results, indent=1) + "\n")
    if options.json:
        print(json.dumps(results, indent=1))
    return 1 if failed else 0


def _run(
    part: str, options: argparse.Namespace, config: Any, arguments: list[str], folder: Path
) -> tuple[list[Any], Any]:
    """Run a part with a fleet of its own; return its outcomes and the verdict."""
    from tests.support.faults.fleet import Fleet, Place, Setting
    from tests.support.faults.network import places
    from tests.support.faults.parts import outcomes_of
    from tests.support.faults.verdict import judge

    number = config.fault_tolerance.group_size
    found = []
    with ExitStack() as stack:
        where = [Place()] * number
        if part == "network":
            where = stack.enter_context(places(number))
        times = (options.pause, options.heartbeat_seconds)
        fleet = Fleet(Setting(config, arguments, folder / "run", where, *times, options.patience))
        stack.callback(fleet.stop)
        for outcome in outcomes_of(part, fleet, options.repeats):
            found.append(outcome)
            print(outcome, file=sys.stderr, flush=True)
    return found, judge(arguments, folder / "run", folder / "replay")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", nargs="?", default="debug_replicas")
    every = list(PARTS[:-1])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=every, help="what to do")
    parser.add_argument("--repeats", type=int, default=1, help="how often each fault happens")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds added to every step")
    parser.add_argument("--heartbeat-seconds", type=float, default=2.0, help="of the quorum server")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds without progress")
    parser.add_argument("--out", default="outputs/ft_kills", help="folder of runs and results")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_with_overrides(argv)
    parser.check_at_least(options, repeats=1, pause=0, heartbeat_seconds=0.5, patience=1)
    parser.check_toml(options.config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
