# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Lines that a library writes to the process's stderr past Python's logging."""

import logging
import os
import threading


class NativeLines:
    """Sends some lines of stderr to the log instead, until `close`.

    torchft's compiled part writes several lines per step there, and has no setting for it.

    Args:
        marker: Lines that contain it are logged at level INFO; all others pass unchanged.
    """

    def __init__(self, marker: bytes) -> None:
        self._marker = marker
        self._stderr = os.dup(2)
        end, start = os.pipe()
        os.dup2(start, 2)
        os.close(start)
        self._thread = threading.Thread(target=self._relay, args=(end,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore stderr, once all lines are through."""
        os.dup2(self._stderr, 2)  # closes the pipe's last end, so the thread comes to its end
        self._thread.join(5.0)

    def _relay(self, end: int) -> None:
        log = logging.getLogger("torchft.native")
        with os.fdopen(end, "rb") as lines:
            for line in lines:
                if self._marker in line:
                    log.info(line.decode(errors="replace").rstrip())
                else:
                    os.write(self._stderr, line)
