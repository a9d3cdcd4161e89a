# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One rank checks a run; the others receive what it found."""

import os
import socket
import subprocess
import sys

import pytest

RANK = """
import os, sys
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.verdict import checked_once

def check():
    print("checked")
    if sys.argv[2] == "refuse":
        raise ConfigError("some.key", 7, "a number such as 8")
    return {"FOUND": "corpus"}

try:
    checked_once(sys.argv[1], check)
    print(os.environ["FOUND"])
except ConfigError as error:
    print(error)
"""


def ranks_say(folder, verdict, **variables):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", RANK, str(folder), verdict]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | meeting | variables | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    return [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]


@pytest.mark.parametrize(
    ("verdict", "line"),
    [("accept", "corpus"), ("refuse", "some.key: got 7, expected a number such as 8")],
)
def test_rank_0_checks_for_all(tmp_path, verdict, line):
    assert ranks_say(tmp_path, verdict) == [["checked", line], [line], [line]]


def test_what_the_launcher_has_checked_is_not_checked_again(tmp_path):
    known = {"TORCHTITAN_LR_LOCKED": str(tmp_path.resolve()), "FOUND": "by the launcher"}
    assert ranks_say(tmp_path, "refuse", **known) == [["by the launcher"]] * 3
