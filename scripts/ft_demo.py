# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Kill and restart replicas on a schedule, and check what they have computed (experimental).

    python scripts/ft_demo.py --kill 30:2,80:0
    python scripts/ft_demo.py debug_replicas --training.steps=60 --kill 10:2 --out demo

A quorum server and the replicas of CONFIG, one thread each, run on this machine. --kill
STEP:REPLICA sends SIGKILL to a replica after a committed step; it is started again --back steps
later. Then three things are checked: after every committed step all replicas had the same bits, no
data were used twice, and one process that takes the same micro-batches has the same losses.
ft_demo.png shows loss, replicas and bytes over time.

Exit status: 0 all checks passed, 1 one failed or a replica failed, 2 invalid arguments.
"""

import argparse
import json
import sys
from pathlib import Path

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.tools.cli import OneLineParser, in_one_line


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the demonstration, check it and draw it; return the exit status."""
    options = _parse(argv)
    # Imported late: they need torch.
    from torchtitan_lr.tools.experiments import check_run
    from torchtitan_lr.tools.ft_demo import Demo, as_text, changes, draw, free_port, read_kills
    from torchtitan_lr.tools.replay import merge_commits, replay

    end = f"127.0.0.1:{free_port()}"
    arguments = [
        f"--job.config_file={options.config}",
        f"--fault_tolerance.lighthouse={end}",
        "--fault_tolerance.digests",
        *options.overrides,
    ]
    section = check_run(arguments, 1).fault_tolerance
    kills = read_kills(options.kill, section.group_size, options.back)
    folder = Path(options.out)
    demo = Demo(arguments, folder / "run", section.group_size)
    if demo.folder.exists():
        raise ConfigError("--out", options.out, "a folder without an earlier demonstration")
    try:
        demo.start_lighthouse(end, section.min_replica_size, options.heartbeat_seconds)
        demo.run(kills, options.limit)
    finally:
        demo.stop()
    commits = merge_commits(demo.folder)
    rows = changes(commits.steps)
    losses = replay(arguments, commits.steps, folder / "replay")
    pairs = zip(losses, commits.steps, strict=True)
    largest = max(abs(loss - record["loss"]) for loss, record in pairs)
    draw(commits.steps, demo.events, folder / "ft_demo.png")
    result = {
        "steps": len(commits.steps),
        "steps_with_unequal_bits": commits.unequal,
        "data_used_twice": commits.twice,
        "largest_loss_difference_of_the_replay": largest,
        "changes": rows,
    }
    (folder / "ft_demo.json").write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(as_text(rows))
        print(f"{len(commits.steps)} committed steps")
        print(f"steps after which replicas had unequal bits: {commits.unequal or 'none'}")
        print(f"data used twice: {commits.twice or 'none'}")
        print(f"replay in one process: losses differ by at most {largest:.1e}")
    return 1 if commits.unequal or commits.twice or not largest <= 1e-4 else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("config", metavar="CONFIG", nargs="?", default="debug_replicas")
    parser.add_argument("--kill", default="30:2,80:0", metavar="STEP:REPLICA,...", help="schedule")
    parser.add_argument("--back", type=int, default=5, help="steps until a replica starts again")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for all of it")
    parser.add_argument("--heartbeat-seconds", type=float, default=2.0, help="of the quorum server")
    parser.add_argument("--out", default="outputs/ft_demo", help="folder of runs and results")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_with_overrides(argv)
    parser.check_at_least(options, back=1, limit=1)
    parser.check_toml(options.config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
