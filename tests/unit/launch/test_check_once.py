# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One rank checks a run; the others receive what it found."""

import os
import socket
import subprocess
import sys

import pytest

from torchtitan_lr.launch.check_once import checked_once

RANK = """
import os, sys
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch.check_once import checked_once

def check():
    print("checked")
    if answer == "refuse":
        raise ConfigError("some.key", 7, "a number such as 8")
    return "signed by rank 0"

def prepare():
    if answer == "no text":
        raise ConfigError("some.path", "a.txt", "text on this machine")
    return {"FOUND": f"corpus of machine {os.environ['GROUP_RANK']}"}

for start in sys.argv[2:]:
    answer, os.environ["MASTER_PORT"] = start.split("@")
    try:
        signed = checked_once(sys.argv[1], check, prepare)
        print(os.environ["FOUND"], signed)
    except ConfigError as error:
        print(error)
"""


MACHINES = [  # two ranks on the first, one on the second
    {"GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    {"GROUP_RANK": "0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    {"GROUP_RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
]


def ranks_say(folder, answers):
    """The lines of each rank, in one start after the other, each with a store of its own."""
    starts = [f"{answer}@{free_port()}" for answer in answers]
    command = [sys.executable, "-c", RANK, str(folder), *starts]
    meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | meeting | {"RANK": str(rank)} | machine,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, machine in enumerate(MACHINES)
    ]
    return [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_rank_0_checks_for_all_and_each_machine_prepares(tmp_path):
    refusal = "some.key: got 7, expected a number such as 8"
    no_text = "some.path: got 'a.txt', expected text on this machine"
    assert ranks_say(tmp_path, ["refuse", "no text", "accept"]) == [
        ["checked", refusal, "checked", no_text, "checked", "corpus of machine 0 signed by rank 0"],
        [refusal, no_text, "corpus of machine 0 signed by rank 0"],
        [refusal, no_text, "corpus of machine 1 signed by rank 0"],
    ]


def test_what_the_launcher_has_checked_is_not_checked_again(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHTITAN_LR_LOCKED", str(tmp_path.resolve()))
    monkeypatch.setenv("TORCHTITAN_LR_LOCK", "signed by the launcher")
    found = checked_once(str(tmp_path), pytest.fail, pytest.fail)
    assert found == "signed by the launcher"  # whatever the lock holds by now
    assert checked_once(str(tmp_path / "other"), lambda: "signed here", dict) == "signed here"
