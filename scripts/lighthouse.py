# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Start the quorum server of replicas that come and go (experimental).

    python scripts/lighthouse.py --min-replicas 2
    python scripts/lighthouse.py --bind 10.0.0.7:29510 --min-replicas 3

The replicas name its host:port as fault_tolerance.lighthouse. It may be restarted while they train.
Whoever reaches the port can take part in quorums: torchft's ports have no authentication.

Exit status: 0 ended by SIGTERM or Ctrl-C, 2 invalid arguments, a taken port, or no torchft.
"""

import sys

from torchtitan_lr.checks.replicas import split_endpoint
from torchtitan_lr.tools.cli import OneLineParser, in_one_line
from torchtitan_lr.tools.lighthouse import (
    HEARTBEAT_SECONDS,
    JOIN_SECONDS,
    lighthouse,
    wait_for_signal,
)


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the server until a signal; return the exit status."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--bind", default="127.0.0.1:29510", help="host:port to listen on")
    parser.add_argument(
        "--min-replicas", type=int, default=2, help="fault_tolerance.min_replica_size"
    )
    parser.add_argument(
        "--join-seconds",
        type=float,
        default=JOIN_SECONDS,
        help="wait for a living replica that heals, saves or validates",
    )
    parser.add_argument(
        "--heartbeat-seconds",
        type=float,
        default=HEARTBEAT_SECONDS,
        help="a replica without a heartbeat for so long is dead",
    )
    parser.add_argument("--public", action="store_true", help="accept a public address")
    options = parser.parse_args(argv)
    parser.check_at_least(options, min_replicas=1)
    split_endpoint(options.bind, "--bind", options.public)
    times = options.join_seconds, options.heartbeat_seconds
    with lighthouse(options.bind, options.min_replicas, *times):
        print(f"lighthouse on {options.bind}, {options.min_replicas} replicas or more", flush=True)
        print(f"ended by {wait_for_signal()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
