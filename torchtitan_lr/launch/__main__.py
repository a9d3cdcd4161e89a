# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``python -m torchtitan_lr.launch``: see `torchtitan_lr.launch.launcher`."""

import signal

from torchtitan_lr.launch.launcher import main, stop_before_ranks
from torchtitan_lr.launch.processes import exit_without_teardown

if __name__ == "__main__":
    # A process started with `cmd &` ignores SIGINT; keep it ignored.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop_before_ranks)
    exit_without_teardown(main())
