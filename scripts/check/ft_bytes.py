# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Count the bytes that a replica sends over the network, beside the formulas.

    python scripts/check/ft_bytes.py

Two replicas of CONFIG train in two network namespaces, the quorum server is beside the first. The
counter of the second one's network device is read before and after the quorum, the sums and the
vote of every step. Then it is killed and started again: the first serves the state. The counter
has Ethernet headers and acknowledgements, of the large packets that the kernel hands over, so that
a real network has some more headers. This needs torchft, root and iproute2; if namespaces are not
permitted, the script prints a note and exits with 0.

Exit status: 0 the sums' payloads are within 1% of the formulas, 1 not, 2 invalid arguments.
"""

import argparse
import json
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict

from tests.support.lighthouse import check_torchft
from torchtitan_lr.commands.parser import OneLineParser, in_one_line, new_folder

SMALL = [
    *("--training.steps=100000", "--validation.no_enable", "--checkpoint.no_enable"),
    *("--training.seq_len=32", "--training.local_batch_size=1", "--lr_scheduler.warmup_steps=1"),
    *("--optimizer.tsr_refresh_interval=8", "--optimizer.tsr_embedding_refresh_interval=8"),
    *("--fault_tolerance.group_size=2", "--fault_tolerance.min_replica_size=2"),
]
"""Two replicas, and steps so short that the bytes of a step hardly depend on their length."""

AGREES = 0.01


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; return the exit status."""
    options = _parse(argv)
    check_torchft()
    # Imported late: they need torch.
    from tests.support.faults.fleet import Fleet, Setting
    from tests.support.faults.network import places
    from tests.support.faults.wire import as_text, formulas, measure
    from tests.support.namespaces import NotPermittedError
    from torchtitan_lr.scaling.experiments import check_run

    arguments = [f"--job.config_file={options.config}", *SMALL, *options.overrides]
    config = check_run(arguments, 1)
    folder = new_folder(options.out)
    # Exit through the end of the block: namespaces outlive their process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    expected = formulas(arguments, config.fault_tolerance.group_size)
    try:
        with ExitStack() as stack:
            where = stack.enter_context(places(config.fault_tolerance.group_size))
            fleet = Fleet(Setting(config, arguments, folder / "run", where, options.pause))
            stack.callback(fleet.stop)
            rows = measure(fleet, expected)
    except NotPermittedError as error:
        print(f"skipped: {error}")
        return 0
    found = [asdict(row) for row in rows]
    (folder / "ft_bytes.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1) if options.json else as_text(rows))
    sums = [row for row in rows if row.formula]
    return 0 if all(abs(row.payload / row.formula - 1) <= AGREES for row in sums) else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", nargs="?", default="debug_replicas")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds added to every step")
    parser.add_argument("--out", default="outputs/ft_bytes", help="folder of runs and results")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_with_overrides(argv)
    parser.check_at_least(options, pause=0.1)
    parser.check_toml(options.config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
