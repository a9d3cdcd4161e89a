# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Ranks and machines that die: torchrun starts the rest again, and no number shows it."""

import re
import signal
import socket
import sys

import pytest

from tests.integration import runs
from tests.support.processes import free_port, listening
from torchtitan_lr.launch.run_folder import read_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")

HELD = "step:7"  # between the checkpoints of steps 4 and 8


def start(config, command=runs.LAUNCH, **variables):
    where = runs.holding(f"{config.stem}:{HELD}")
    return runs.Process(command, CONFIG_FILE=str(config), **where, **variables)


def training(folder):
    return [record for record in runs.exact(runs.history(folder)) if "grad_norm" in record]


def restarts(done):
    return re.findall(r"^restart .*", done.err, re.MULTILINE)


def test_a_killed_rank_is_started_again_and_killed_again(tmp_path, undisturbed):
    """The second death is one too many; the same command resumes, to the digits of no death."""
    folder = tmp_path / "dump"
    config = runs.write_config(folder)
    run = start(config, NGPU="2", MAX_RESTARTS="1")
    first = run.wait_for_held(2)
    # No other machine can reach the launcher's store, or the ranks' sockets of gloo.
    found = {pid: listening(pid) for pid in (run.pid, *first)}
    assert len(found[run.pid]) == 1 and all(found[rank] for rank in first)
    assert all(address.is_loopback for addresses in found.values() for address in addresses)
    runs.send_all(first[1:], signal.SIGKILL)
    runs.send_all(first[:1], signal.SIGCONT)
    # From step 4 to the same place again.
    second = run.wait_until(lambda: (pids := run.wait_for_held(2)) != first and pids)
    assert not set(first) & set(second)
    runs.send_all(second[1:], signal.SIGKILL)
    runs.send_all(second[:1], signal.SIGCONT)
    done = run.finish()
    assert done.status == 1, done.everything
    runs.wait_until_gone([*first, *second])
    what = "rank 1 was ended by SIGKILL"
    restart, told = done.own_lines()
    assert restart == f"restart (1 of 1 after failures): {what}; 1 machine, 2 ranks"
    assert told.startswith(f"error: {what}") and "/attempt_1/1" in told
    assert told.endswith(f"to resume from {folder}/checkpoint/step-4")
    state = read_state(folder)
    assert (state["state"], state["rank"], runs.last_step(folder)) == ("failed", 1, 6)
    resumed = runs.launch(config).finish()
    assert resumed.status == 0, resumed.everything
    assert "Training starts at step 5\n" in resumed.out
    assert training(folder) == training(undisturbed.folder)


def test_a_stopped_rank_is_not_taken_for_a_killed_one(tmp_path):
    """Rank 1 answers nobody; rank 0 gives up a collective; torchrun must kill rank 1."""
    config = runs.write_config(tmp_path / "dump", steps=8)
    # The limit holds from the second step on, which nothing but this wait is part of.
    process = runs.launch(config, "--comm.train_timeout_seconds=2", hold="dump:step:2")
    ranks = process.wait_for_held(2)
    runs.send_all(ranks[:1], signal.SIGCONT)
    done = process.finish()
    runs.wait_until_gone(ranks)
    (line,) = done.own_lines()
    assert line.startswith("error: rank 0 failed: ") and "imed out" in line, done.everything
    # What rank 0 waited for, as the page reads it.
    page = (runs.ROOT / "docs/debug.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "read.py"
    file.write_text(script.replace("outputs/run", str(tmp_path / "dump")))
    read = runs.run([sys.executable, file])
    assert read.status == 0 and read.out.startswith("gloo:all_gather ('0', "), read.everything
    assert re.search(r"training/trainer.py \d+ one_pass\n", read.out)
    assert "; rank 1 did not end on SIGTERM: stopped, or stuck; its output: " in line


def answers(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("loss", ["machine", "GPU"])
def test_a_lost_machine_is_done_without(loss, tmp_path, undisturbed):
    """Two launchers are two machines of one rank; the one without the store dies, or leaves."""
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
    gpus = tmp_path / "gpus"
    gpus.write_text("1")
    second = start(config, runs.FEW_GPUS, GPUS=str(gpus), **variables)
    of_second = second.wait_for_held(1)
    held = first.wait_for_held(1)
    if loss == "GPU":
        gpus.write_text("0")
        runs.send_all(of_second, signal.SIGKILL)
    else:
        second.send(signal.SIGKILL)  # torchrun and its rank end with it
    left = second.finish()
    assert left.status == (4 if loss == "GPU" else -signal.SIGKILL), left.everything
    runs.send_all(held, signal.SIGCONT)
    again = first.wait_until(lambda: (pids := first.wait_for_held(1)) != held and pids)
    runs.send_all(again, signal.SIGCONT)
    done = first.finish()
    assert done.status == 0, done.everything
    assert restarts(done)[-1].endswith("; 1 machine, 1 rank")
    assert read_state(tmp_path / "dump")["state"] == "finished"
    mine, alone = training(tmp_path / "dump"), training(undisturbed.folder)
    assert [record["step"] for record in mine] == list(range(1, 15))
    # As many ranks as in the undisturbed run: the same digits. One rank rounds differently.
    assert mine[:4] == alone[:4]
    largest = "loss_metrics/global_max_loss"  # of the ranks' means: it depends on their number
    for record, other in zip(mine[4:], alone[4:], strict=True):
        assert record.pop(largest) != other[largest]
        assert record == pytest.approx({key: other[key] for key in record}, rel=1e-4)
