# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Commands of ``scripts/scaling.py`` one after the other, in one process with one fork server.

    python -m tests.integration.scaling_commands STOP_AT COMMANDS

COMMANDS is a list of lists of arguments in JSON. The first command receives SIGINT as soon as the
file STOP_AT exists. Prints the status of each command after its output.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from scripts.scaling import main


def interrupt(path):
    while not path.exists():
        time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    threading.Thread(target=interrupt, args=(Path(sys.argv[1]),), daemon=True).start()
    for arguments in json.loads(sys.argv[2]):
        print(f"status {main(arguments)}\n{'-' * 9}", flush=True)
