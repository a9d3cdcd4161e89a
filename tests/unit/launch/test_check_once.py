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
from torchtitan_lr.launch.check_once import checked_once

def check():
    print("checked")
    if sys.argv[2] == "refuse":
        raise ConfigError("some.key", 7, "a number such as 8")

def prepare():
    if sys.argv[2] == "no text":
        raise ConfigError("some.path", "a.txt", "text on this machine")
    return {"FOUND": f"corpus of machine {os.environ['GROUP_RANK']}"}

try:
    checked_once(sys.argv[1], check, prepare)
    print(os.environ["FOUND"])
except ConfigError as error:
    print(error)
"""


MACHINES = [  # two ranks on the first, one on the second
    {"GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    {"GROUP_RANK": "0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    {"GROUP_RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
]


def ranks_say(folder, answer, **variables):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", RANK, str(folder), answer]
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | meeting | variables | {"RANK": str(rank)} | machine,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, machine in enumerate(MACHINES)
    ]
    return [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]


@pytest.mark.parametrize(
    ("answer", "lines"),
    [
        ("accept", [f"corpus of machine {number}" for number in (0, 0, 1)]),
        ("refuse", ["some.key: got 7, expected a number such as 8"] * 3),
        ("no text", ["some.path: got 'a.txt', expected text on this machine"] * 3),
    ],
)
def test_rank_0_checks_for_all_and_each_machine_prepares(tmp_path, answer, lines):
    assert ranks_say(tmp_path, answer) == [["checked", lines[0]], [lines[1]], [lines[2]]]


def test_what_the_launcher_has_checked_is_not_checked_again(tmp_path):
    known = {"TORCHTITAN_LR_LOCKED": str(tmp_path.resolve()), "FOUND": "by the launcher"}
    assert ranks_say(tmp_path, "refuse", **known) == [["by the launcher"]] * 3
