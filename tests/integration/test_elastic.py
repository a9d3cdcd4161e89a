# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Ranks and machines that die: torchrun starts the rest again, and no number shows it."""

import re
import signal
import socket
import sys

import pytest

from tests.integration import runs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")

HELD = "step:7"  # between the checkpoints of steps 4 and 8


def start(config, **variables):
    where = runs.holding(f"{config.stem}:{HELD}")
    return runs.Process(runs.LAUNCH, CONFIG_FILE=str(config), **where, **variables)


def training(folder):
    return [record for record in runs.exact(runs.history(folder)) if "grad_norm" in record]


def restarts(done):
    return re.findall(r"^restart .*", done.err, re.MULTILINE)


def test_a_killed_rank_is_started_again(tmp_path, undisturbed):
    config = runs.write_config(tmp_path / "dump")
    run = start(config, NGPU="2", MAX_RESTARTS="1")
    first = run.wait_for_held(2)
    runs.send_all(first[1:], signal.SIGKILL)
    runs.send_all(first[:1], signal.SIGCONT)
    # From step 4 to the same place again.
    second = run.wait_until(lambda: (pids := run.wait_for_held(2)) != first and pids)
    assert not set(first) & set(second)
    runs.send_all(second, signal.SIGCONT)
    done = run.finish()
    assert done.status == 0, done.everything
    what = "rank 1 was ended by SIGKILL; 1 machine, 2 ranks"
    assert restarts(done) == [f"restart (1 of 1 after failures): {what}"]
    assert [line for line in done.own_lines() if "error" in line] == []
    assert training(tmp_path / "dump") == training(undisturbed.folder)


def test_restarts_come_to_an_end(tmp_path):
    """The second death is one too many: the launcher reports it and how to resume."""
    config = runs.write_config(tmp_path / "dump")
    run = start(config, NGPU="1", MAX_RESTARTS="1")
    first = run.wait_for_held(1)
    runs.send_all(first, signal.SIGKILL)
    second = run.wait_until(lambda: (pids := run.wait_for_held(1)) != first and pids)
    runs.send_all(second, signal.SIGKILL)
    done = run.finish()
    assert done.status == 1, done.everything
    told = done.err.splitlines()[-1]
    assert told.startswith("error: rank 0 was ended by SIGKILL") and "/attempt_1/0" in told
    assert told.endswith(f"to resume from {tmp_path}/dump/checkpoint/step-4")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.nightly
def test_a_lost_machine_is_done_without(tmp_path, undisturbed):
    """Two launchers are two machines of one rank; the one without the store dies as a whole."""
    config = runs.write_config(tmp_path / "dump")
    text = config.read_text().replace("[training]", "[training]\nglobal_batch_size = 4")
    config.write_text(text)
    port = free_port()
    variables = {
        "NGPU": "1",
        "NNODES": "1:2",
        "MAX_RESTARTS": "2",
        "RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "RDZV_CONF": "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=2",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    first = start(config, **variables)
    first.wait_until(lambda: answers(port))  # it has the store
    second = start(config, **variables)
    second.wait_for_held(1)
    held = first.wait_for_held(1)
    second.send(signal.SIGKILL)  # torchrun and its rank end with it
    second.finish()
    runs.send_all(held, signal.SIGCONT)
    again = first.wait_until(lambda: (pids := first.wait_for_held(1)) != held and pids)
    runs.send_all(again, signal.SIGCONT)
    done = first.finish()
    assert done.status == 0, done.everything
    assert restarts(done)[-1].endswith("; 1 machine, 1 rank")
    mine, alone = training(tmp_path / "dump"), training(undisturbed.folder)
    assert [record["step"] for record in mine] == list(range(1, 15))
    # As many ranks as in the undisturbed run: the same digits. One rank rounds differently.
    assert mine[:4] == alone[:4]
    largest = "loss_metrics/global_max_loss"  # of the ranks' means: it depends on their number
    for record, other in zip(mine[4:], alone[4:], strict=True):
        assert record.pop(largest) != other[largest]
        assert record == pytest.approx({key: other[key] for key in record}, rel=1e-4)
