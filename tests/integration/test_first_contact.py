# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/first_contact.sh``: its report, where parts pass, fail and take too long.

A rehearsal of the table at 60M, on a CPU with the debug model, is the last test.
"""

import gzip
import json
import subprocess
import sys
import time

import pytest

from scripts import first_contact
from scripts.first_contact import Contact, hidden_share
from scripts.research.gpu_60m import REHEARSAL, Race, main
from tests.integration.runs import ROOT, environment, run, wait_until_gone
from torchtitan_lr.costs.hardware import load_hardware

KERNELS = [  # name, begin and duration in microseconds
    ("ncclDevKernel_AllGather", 0, 100),
    ("gemm", 50, 20),
    ("silu", 60, 20),  # another stream: 10 of its 20 are beside gemm
    ("ncclDevKernel_ReduceScatter", 200, 100),
    ("gemm", 250, 500),
]


@pytest.mark.parametrize("compressed", [False, True])
def test_the_share_of_messages_that_computation_hides(tmp_path, compressed):
    events = [{"cat": "kernel", "name": n, "ts": t, "dur": d} for n, t, d in KERNELS]
    text = json.dumps({"traceEvents": [*events, {"cat": "cpu_op", "name": "x", "ts": 0, "dur": 9}]})
    path = tmp_path / "rank0_trace.json"
    path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
    if compressed:
        path = path.rename(f"{path}.gz")
    assert hidden_share(path) == pytest.approx((200e-6, (30 + 50) / 200))


def test_a_part_that_fails_is_told_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def refused(contact):
        return contact.run([sys.executable, "-c", "print('its last words'); exit(3)"], 1)

    def rows(contact):
        def cells():
            raise RuntimeError("no")

        return str([contact.row("a", lambda: ["1", "2"]), contact.row("b", cells)])

    parts = {"First": (refused, 60), "Second": (rows, 60), "Third": (lambda _: "fine", 60)}
    monkeypatch.setattr(first_contact, "PARTS", parts)
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["first_contact", "--small", "--out", str(out)])
    monkeypatch.setenv("PATH", str(tmp_path))  # an image has no git
    assert first_contact.main() == 1
    page = (out / "report.md").read_text()
    assert "FAILED: RuntimeError: status 3: its last words" in page
    assert "['a', '1', '2'], ['b', 'FAILED', '-']" in page and "fine" in page
    assert page.endswith("First: status 3: its last words\nb: no\n")
    with pytest.raises(SystemExit):  # evidence is not written over
        first_contact.main()
    assert "names another folder" in capsys.readouterr().err


LAUNCHES = """
import signal, subprocess, sys
rank = subprocess.Popen(["sleep", "600"], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: rank.kill())
open(sys.argv[1], "w").write(str(rank.pid))
rank.wait()
"""


def test_a_command_ends_with_its_parts_time(tmp_path):
    """With a rank, of a session of its own, which its launcher ends when it is asked to."""
    began = time.monotonic()
    contact = Contact(1, True, tmp_path, deadline=began + 5)
    with pytest.raises(TimeoutError, match="its part's time is over"):
        contact.run([sys.executable, "-c", LAUNCHES, str(tmp_path / "rank")], 1)
    assert time.monotonic() - began < 60
    wait_until_gone([int((tmp_path / "rank").read_text())])
    # The next row starts nothing.
    with pytest.raises(TimeoutError, match="its part's time is over"):
        contact.run([sys.executable, "-c", "print('late')"], 1)
    said = (tmp_path / "commands.log").read_text()
    assert said.startswith("$ NGPU=1 ") and "late" not in said


@pytest.mark.nightly
@pytest.mark.timeout(850)  # many starts of ranks
def test_the_rehearsal_passes(tmp_path):
    out = tmp_path / "contact"
    command = ["bash", ROOT / "scripts/first_contact.sh", "--small", "--out", out]
    python = environment(PYTHON=sys.executable)
    done = subprocess.run(command, env=python, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (out / "report.md").read_text()
    assert page.endswith("All parts passed.\n") and len(page.splitlines()) < 80
    for layout in ("fsdp 4", "tp 2, fsdp 2", "pp 2, fsdp 2", "replicas 2, fsdp 2"):
        assert f"\n{layout} " in page
    assert "all rows agree with the formulas" in page and "not on CPUs" in page
    machine = load_hardware(str(out / "here.toml"))
    assert machine.intra_node_gbytes_per_s > 0 and "modelled: " in page


@pytest.mark.nightly
def test_a_rehearsal_ends_with_all_curves_and_names_what_is_cut_off(tmp_path):
    command = [sys.executable, "-m", "scripts.research.gpu_60m"]
    common = [f"--work={tmp_path}", "--small", "--device=cpu", "--seconds=3000"]
    for part in ("corpus", "tokens", "run"):
        done = run([*command, part, *common])
        assert done.status == 0, done.everything
    out = tmp_path / "gpu_60m.json"
    found = json.loads(out.read_text())
    listed = json.loads((tmp_path / "corpus.json").read_text())
    assert found["corpus"] == listed and listed["files"] == REHEARSAL.files
    assert len(found["runs"]) == 7
    for each in found["runs"].values():
        assert each["status"] == "finished" and 5 < each["val_loss"] < 7  # ln 512 is 6.2
        assert [step for step, _ in each["curve"]] == [1, 2, 3, 4]

    race = Race(tmp_path, out, REHEARSAL)
    race.plan.experiment = race.with_steps(found["steps"])
    race.points = race.plan.points(race.plan.searched({}))
    assert len(race.points) == 7
    point = tmp_path / "runs" / race.points[-1].name / "point.json"
    point.write_text(point.read_text().replace('"status": "finished"', '"status": "stopped"'))
    race.write()
    states = [run["status"] for run in json.loads(out.read_text())["runs"].values()]
    assert states == ["finished"] * 6 + ["cut off"]


def test_a_machine_without_a_gpu_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["run", f"--work={tmp_path}"]) == 2
    assert capsys.readouterr().err == (
        "error: --device: got 'cuda', expected cpu with --small: this machine shows no GPU\n"
    )
