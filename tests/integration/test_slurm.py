# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/slurm/train.sbatch`` under a real Slurm: two nodes of two ranks, one of which dies.

It runs with ``--full`` alone: three starts of four ranks are minutes.
"""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.integration import runs, slurm_cluster

STEPS = 10  # checkpoints at 4, 8 and the last


@pytest.fixture
def slurm(request, tmp_path):
    if not request.config.getoption("--full"):
        pytest.skip("takes minutes: run with --full")
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    folder = tmp_path / "slurm"
    folder.mkdir()
    with slurm_cluster.cluster(folder) as cluster:
        yield cluster


def held(where):
    """Ranks that hold themselves, see `tests.integration.held_train`."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        if runs.process_state(int(entry)) == "T":
            environ = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            if f"HOLD={where}".encode() in environ:
                found.append(int(entry))
    return found


def test_a_job_survives_its_node_and_its_notice(slurm, tmp_path):
    config = runs.write_config(tmp_path / "dump", steps=STEPS, interval=4)
    (port,) = slurm_cluster.free_ports(1)
    log, where = tmp_path / "job.log", "dump:step:6"
    variables = runs.environment(
        CONFIG_FILE=str(config),
        NGPU="2",
        PYTHON=sys.executable,
        RDZV_ENDPOINT=f"127.0.0.1:{port}",  # the nodes' names are of this test
        GLOO_SOCKET_IFNAME="lo",
        **runs.holding(where),
    )
    script = runs.ROOT / "scripts/slurm/train.sbatch"
    job = slurm.submit("--nodes=2", f"--chdir={runs.ROOT}", f"--output={log}", script, **variables)

    def starts():
        return len(re.findall(r" start \d of job", log.read_text())) if log.exists() else 0

    # The first start loses a node in step 6; srun or Slurm notices, and the job waits for the node.
    first = slurm.wait_until(lambda: len(pids := held(where)) == 4 and pids, "ranks")
    slurm.kill_node("n2")
    slurm.wait_until(lambda: slurm.state(job) == "PENDING", "requeue after a lost node")
    runs.wait_until_gone(first)
    slurm.start_node("n2")
    # The second resumes from step 4. It gets the notice in step 6, as before the end of its time.
    second = slurm.wait_until(lambda: len(pids := held(where)) == 4 and pids, "ranks again")
    assert starts() == 2 and runs.complete_steps(tmp_path / "dump") == {4}
    slurm.query("scancel", "--signal=USR1", "--batch", job)
    slurm.wait_until(
        lambda: all(runs.is_pending(pid, signal.SIGUSR1) for pid in second), "the notice"
    )
    runs.send_all(second, signal.SIGCONT)
    # The third resumes from there and ends.
    slurm.wait_until(lambda: starts() == 3, "requeue after the notice")
    assert runs.complete_steps(tmp_path / "dump") == {4, 6}
    slurm.wait_until(lambda: slurm.state(job) == "COMPLETED", "end")
    text = log.read_text()
    assert "end of start 1 with status 0" in text and "end of start 2 with status 0" in text
    assert text.count("notice of Slurm") == 1
    # One output folder: a log folder for each start and node, with a log for each rank.
    folders = list((tmp_path / "dump" / "logs").iterdir())
    assert len(folders) == 6
    assert all(len(list(folder.glob("*/attempt_0/*/stdout.log"))) == 2 for folder in folders)

    alone = runs.write_config(tmp_path / "alone", steps=STEPS, interval=4)
    done = runs.launch(alone, ranks=4).finish()
    assert done.status == 0, done.everything
    histories = [runs.history(tmp_path / name) for name in ("dump", "alone")]
    disturbed, undisturbed = ([r for r in runs.exact(h) if "grad_norm" in r] for h in histories)
    assert len(undisturbed) == STEPS and disturbed == undisturbed


def test_the_script_is_bash():
    script = runs.ROOT / "scripts/slurm/train.sbatch"
    done = runs.run(["bash", "-n", script])
    assert (done.status, done.err) == (0, "")
    lines = script.read_text().splitlines()
    # Slurm reads its options up to the first command.
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert options and all(lines.index(line) < first for line in options)
