# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the launcher says at the end."""

import json
from pathlib import Path

import pytest

from torchtitan_lr.launch.processes import RANK_STARTED
from torchtitan_lr.launch.report import (
    DID_NOT_END,
    describe_failure,
    disk_trouble,
    hidden_errors,
    killed_rank,
    summary_lines,
)


def test_first_failure_is_the_one_told(tmp_path):
    for rank, when in ((0, 20), (1, 10)):
        folder = tmp_path / "run" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        message = {"message": f"Error: of {rank}\nmore", "extraInfo": {"timestamp": str(when)}}
        (folder / "error.json").write_text(json.dumps({"message": message}))
    half = tmp_path / "run" / "attempt_0" / "2"
    half.mkdir()
    (half / "error.json").write_text('{"mess')
    told = describe_failure(tmp_path, 1)
    assert str(told) == f"rank 1 failed: Error: of 1; its output: {tmp_path}/run/attempt_0/1"
    assert (told.rank, told.by_signal) == (1, False)
    unknown = describe_failure(tmp_path / "none", 3)
    assert str(unknown) == f"the ranks ended with status 3; their output: {tmp_path / 'none'}"
    assert (unknown.rank, unknown.by_signal) == (None, False)


REPORT = """
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 13188)  (SIGTERM)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  rank      : 5 (local_rank: 1)
  exitcode  : {code}
  error_file: <N/A>
"""


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("-9 (pid: 13189)  (SIGKILL)", (1, "SIGKILL")),
        ("-11 (pid: 13189)  (SIGSEGV)", (1, "SIGSEGV")),
        ("-9 (pid: 13189)", (1, "SIGKILL")),  # before torch 2.13
        ("-99 (pid: 13189)", None),
        ("1 (pid: 13189)", None),
        ("-15 (pid: 13189)  (SIGTERM)", None),
    ],
)
def test_a_rank_that_a_signal_ended_is_found(code, found, tmp_path):
    assert killed_rank(tmp_path) is None
    (tmp_path / "launcher.log").write_text(REPORT.format(code=code))
    assert killed_rank(tmp_path) == found


STACK = """Traceback (most recent call last):
  File "/site/torchtitan/train.py", line 600, in train
    self.train_step(data_iterator)
  File "/src/torchtitan_lr/agreement.py", line 75, in agree
    dist.all_reduce(findings, op=dist.ReduceOp.MAX)
  File "/site/torch/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
  File "/site/torch/distributed/distributed_c10d.py", line 3100, in all_reduce
    work.wait()
"""


@pytest.mark.parametrize("stuck", [True, False])
def test_a_rank_that_torchrun_had_to_kill_is_not_the_cause(tmp_path, stuck):
    """A rank is stopped, the other waits for it in vain, torchrun kills what does not end."""
    folder = tmp_path / "run/attempt_0/0"
    folder.mkdir(parents=True)
    error = {"message": "RuntimeError: [gloo] Timed out waiting 1000ms", "extraInfo": {}}
    error["extraInfo"] = {"timestamp": "1", "py_callstack": STACK}
    (folder / "error.json").write_text(json.dumps({"message": error}))
    said = f"rank process 77 {DID_NOT_END}\n" if stuck else ""
    report = REPORT.format(code="-9 (pid: 77)  (SIGKILL)")
    (tmp_path / "launcher.log").write_text(said + report)
    told = describe_failure(tmp_path, 1)
    if not stuck:
        assert told.what.startswith("rank 1 was ended by SIGKILL")
        return
    assert killed_rank(tmp_path) is None
    assert str(told) == (
        "rank 0 failed: RuntimeError: [gloo] Timed out waiting 1000ms in all_reduce "
        "(agreement.py: agree); rank 1 did not end on SIGTERM: stopped, or stuck; "
        f"its output: {folder}"
    )


def test_ranks_have_the_numbers_of_the_run(tmp_path):
    """The second machine of two ranks each: torchrun's folders are 0 and 1, the ranks 2 and 3."""
    log = tmp_path / "launcher.log"
    started = "".join(
        f"process {pid} {RANK_STARTED} {pid} (local_rank: {pid - 2})\n" for pid in (2, 3)
    )
    log.write_text(started + REPORT.format(code="-9 (pid: 3)  (SIGKILL)"))
    killed = describe_failure(tmp_path, 1)
    assert killed.what.startswith("rank 3 was ended by SIGKILL (the kernel")
    assert (killed.rank, killed.by_signal) == (3, True)
    log.write_text(started)
    folder = tmp_path / "run" / "attempt_0" / "1"
    folder.mkdir(parents=True)
    what = "RuntimeError: [pair.cc:542] Connection reset by peer [10.0.0.1]:5"
    error = {"message": what, "extraInfo": {"timestamp": "1"}}
    (folder / "error.json").write_text(json.dumps({"message": error}))
    (folder / "stderr.log").write_text(f"error: {what}\n")
    told = describe_failure(tmp_path, 1)
    assert told.what == f"rank 3 failed: {what}; another rank ended before, or cannot be reached"
    assert hidden_errors(tmp_path, {0}) == [f"[rank3]:error: {what}"]
    log.write_text(
        started + "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: x"
    )
    assert "; the machine of RDZV_ENDPOINT cannot be reached" in describe_failure(tmp_path, 1).what


@pytest.mark.parametrize("value", ["a\x1b[31m", [1], {}, True, float("nan"), None])
def test_a_damaged_summary_costs_its_cells(value):
    summary = {"train_loss": 2.5, "steps": value, "mfu": value, "checkpoint": value}
    lines = summary_lines(summary, Path("a"), Path("b"))
    assert lines[0].split() == ["steps", "-"] and "2.5000" in lines[1]
    assert "".join(lines).isprintable()


def test_what_was_sent_is_told_beside_the_baseline():
    summary = {"sent_bytes": 2_400_000, "adamw_bytes": 7_100_000}
    (line,) = (row for row in summary_lines(summary, Path("a"), Path("b")) if "sent" in row)
    assert line.split("  ")[-1].strip() == "2.4 MB per step by formula (AdamW 7.1)"
    # The control: one rank sends nothing.
    assert not any("sent" in row for row in summary_lines({}, Path("a"), Path("b")))


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    assert disk_trouble(tmp_path, "rank 0 failed") == ""
    assert (
        disk_trouble(Path("/proc"), "") == "; /proc cannot be written (No such file or directory)"
    )
    shared = "RuntimeError: unable to write to file </torch_7_1>: No space left on device (28)"
    assert disk_trouble(tmp_path, shared).startswith("; no space left in /dev/shm: fewer training.")
    full = disk_trouble(tmp_path, "OSError: No space left on device")
    assert full.startswith(f"; no space left in {tmp_path} (")
