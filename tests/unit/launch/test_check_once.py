# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""One rank checks a run; the others receive what it found."""

import multiprocessing
import os
import runpy

import pytest
from torch.distributed import TCPStore

from torchtitan_lr import train
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.launch import processes
from torchtitan_lr.train import checked_once

MACHINES = [  # two ranks on the first, one on the second
    {"GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    {"GROUP_RANK": "0", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    {"GROUP_RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
]


def starts(rank, ports, told):
    """The lines of a rank in one start after the other, each with a store of its own."""
    os.environ.update(MACHINES[rank], RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1")
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torchrun's, as below a launcher
    lines = []
    answer = ""

    def check():
        lines.append("checked")
        if answer == "refuse":
            raise ConfigError("some.key", 7, "a number such as 8")
        return "signed by rank 0"

    def prepare(signed):
        assert signed == "signed by rank 0"
        if answer == "no text":
            raise ConfigError("some.path", "a.txt", "text on this machine")
        return {"FOUND": f"corpus of machine {os.environ['GROUP_RANK']}"}

    def check_tokens():
        lines.append("tokens")
        if answer == "few":
            raise ConfigError("some.key", 9, "fewer")

    for answer, port in ports.items():  # noqa: B007 (`check` and `prepare` read it)
        os.environ["MASTER_PORT"] = str(port)
        try:
            signed = checked_once(check, prepare, check_tokens)
            lines.append(f"{os.environ['FOUND']} {signed}")
        except Exception as error:
            lines.append(str(error))
    told.put((rank, lines))
    told.close()
    told.join_thread()


def test_rank_0_checks_for_all_and_each_machine_prepares():
    answers = ("refuse", "no text", "few", "accept")
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in answers]
    ports = {answer: store.port for answer, store in zip(answers, stores, strict=True)}
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    ranks = [context.Process(target=starts, args=(rank, ports, told)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    found = dict(told.get(timeout=300) for _ in ranks)
    for rank in ranks:
        rank.join(timeout=60)
    refusal = "some.key: got 7, expected a number such as 8"
    no_text = "some.path: got 'a.txt', expected text on this machine"
    here, there = (f"corpus of machine {machine} signed by rank 0" for machine in (0, 1))
    few = "some.key: got 9, expected fewer"
    own = ["checked", refusal, "checked", no_text, "checked", "tokens", few]
    assert found == {
        0: [*own, "checked", "tokens", here],
        1: [refusal, no_text, few, here],
        2: [refusal, no_text, few, there],
    }


def test_what_the_launcher_has_checked_is_not_checked_again(monkeypatch):
    monkeypatch.setenv("TORCHTITAN_LR_LOCK", "signed by the launcher")
    assert checked_once(*3 * [pytest.fail]) == "signed by the launcher"


def test_a_process_that_a_rank_spawns_is_not_bound_to_the_launcher(monkeypatch):
    monkeypatch.setattr(processes, "begin_rank", pytest.fail)
    runpy.run_path(train.__file__, run_name="__mp_main__")  # as the child begins
