# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the launcher says at the end."""

import json
import math
import shutil

import pytest

from torchtitan_lr.launch.report import (
    DID_NOT_END,
    describe_failure,
    full_disk,
    hidden_errors,
    killed_rank,
    read_summary,
    recorded_by_rank_0,
    summary_lines,
)


def test_summary_of_another_run_is_not_shown(tmp_path):
    path = tmp_path / "summary.json"
    assert read_summary(tmp_path, newer_than=0.0) is None
    path.write_text('{"steps": 1}')
    assert read_summary(tmp_path, newer_than=path.stat().st_mtime - 1) == {"steps": 1}
    assert read_summary(tmp_path, newer_than=path.stat().st_mtime + 1) is None


def test_summary_lines(tmp_path):
    summary = {
        "steps": 300,
        "train_loss": 3.25,
        "val_loss": 3.5,
        "val_ppl": math.exp(3.5),
        "unigram_entropy": 6.125,
        "tokens_per_s": 12345.6,
        "mfu": 41.5,
        "peak_memory_gib": 1.5,
        "checkpoint": "out/checkpoint/step-300",
        "curve": "out/curve.png",
    }
    lines = summary_lines(summary, tmp_path, tmp_path / "logs")
    assert len(lines) <= 12
    text = "\n".join(lines)
    for part in ("300", "3.2500", "3.5000", "33.12", "6.1250", "12,346", "41.50 %", "1.50 GiB"):
        assert part in text
    assert "step-300" in text and "curve.png" in text and str(tmp_path / "logs") in text


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
    assert told == f"rank 1 failed: Error: of 1; its output: {tmp_path}/run/attempt_0/1"
    assert describe_failure(tmp_path / "none", 3).startswith("the ranks ended with status 3")


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


def test_a_killed_rank_is_the_cause_not_those_that_missed_it(tmp_path):
    (tmp_path / "launcher.log").write_text(REPORT.format(code="-9 (pid: 1)  (SIGKILL)"))
    folder = tmp_path / "run/attempt_0/1"
    folder.mkdir(parents=True)
    other = tmp_path / "run/attempt_0/0"
    other.mkdir()
    message = {"message": "RuntimeError: Connection closed", "extraInfo": {"timestamp": "1"}}
    (other / "error.json").write_text(json.dumps({"message": message}))
    told = describe_failure(tmp_path, 1)
    assert told.startswith("rank 1 was ended by SIGKILL (the kernel also")
    assert told.endswith(f"its output: {folder}")


def test_a_rank_that_fell_after_telling_its_error_is_no_killed_one(tmp_path):
    (tmp_path / "launcher.log").write_text(REPORT.format(code="-6 (pid: 1)  (SIGABRT)"))
    assert killed_rank(tmp_path) == (1, "SIGABRT")
    folder = tmp_path / "run/attempt_0/1"
    folder.mkdir(parents=True)
    message = {"message": "NonFiniteError: step 2", "extraInfo": {"timestamp": "1"}}
    (folder / "error.json").write_text(json.dumps({"message": message}))
    assert killed_rank(tmp_path) is None
    assert describe_failure(tmp_path, 1).startswith("rank 1 failed: NonFiniteError: step 2;")


STACK = """Traceback (most recent call last):
  File "/site/torchtitan/train.py", line 600, in train
    self.train_step(data_iterator)
  File "/src/torchtitan_lr/training/guard.py", line 75, in agree
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
        assert told.startswith("rank 1 was ended by SIGKILL")
        return
    assert killed_rank(tmp_path) is None
    assert told == (
        "rank 0 failed: RuntimeError: [gloo] Timed out waiting 1000ms in all_reduce "
        "(guard.py: agree); rank 1 did not end on SIGTERM: stopped, or stuck; "
        f"its output: {folder}"
    )


def test_a_full_disk_is_told_with_what_is_free(tmp_path):
    assert full_disk(tmp_path, "rank 0 failed: ValueError: no such luck") == ""
    told = full_disk(tmp_path, "rank 0 failed: OSError: [Errno 28] No space left on device")
    free = shutil.disk_usage(tmp_path).free / 2**20
    start, _, rest = told.partition(f"; no space left in {tmp_path} (")
    assert start == "" and rest.endswith(" MiB free)")
    assert float(rest.split()[0]) == pytest.approx(free, rel=0.2)


def test_torchrun_that_a_signal_ended_is_told(tmp_path):
    assert describe_failure(tmp_path, -9).startswith("torchrun was ended by SIGKILL, and its ranks")


@pytest.mark.parametrize(
    ("words", "shown", "told"),
    [
        ({0: "error: a", 1: "error: b"}, {0}, []),
        ({0: "error: a", 1: "error: b"}, {2}, ["[rank0]:error: a"]),
        ({0: "", 1: "error: b"}, {0}, ["[rank1]:error: b"]),
        ({0: "", 1: "error: b"}, {0, 1}, []),
        ({2: "error: c", 10: "error: d"}, {0}, ["[rank2]:error: c"]),
        ({0: "x - Stopped by SIGTERM after step 3 of 9"}, {1}, ["[rank0]:x - Stopped by SIGTERM"]),
        ({0: "an error: of another kind"}, {1}, []),
        ({}, {0}, []),
    ],
)
def test_last_words_are_those_the_console_lacks(tmp_path, words, shown, told):
    for rank, text in words.items():
        folder = tmp_path / "run" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        # Behind more than a long run's output ends with.
        (folder / "stderr.log").write_text("a line\n" * 20_000 + text + "\nmore\n")
        (folder / "stdout.log").write_text("another line\n")
    found = hidden_errors(tmp_path, shown)
    assert [line[: len(start)] for line, start in zip(found, told, strict=True)] == told


@pytest.mark.parametrize(
    ("failure", "record", "expected"),
    [
        ("rank 0 failed: NonFiniteError: step 2", {"state": "failed"}, True),
        ("the ranks ended with status 2; their output: x", {"state": "failed"}, True),
        ("the ranks ended with status 2; their output: x", {"state": "finished"}, True),
        # Rank 0 could not record anything, or only what another one's end did to it.
        ("rank 0 failed: NonFiniteError: step 2", {"state": "running"}, False),
        ("rank 0 failed: NonFiniteError: step 2", None, False),
        ("rank 1 failed: RuntimeError: out of memory", {"state": "failed"}, False),
        ("rank 0 was ended by SIGKILL", {"state": "running"}, False),
    ],
)
def test_who_records_a_failure(failure, record, expected):
    assert recorded_by_rank_0(failure, record) is expected


@pytest.mark.parametrize("error", ["Connection", "Timeout", "Closed"])
def test_a_lost_rendezvous_is_told(tmp_path, error):
    line = f"torch.distributed.elastic.rendezvous.api.Rendezvous{error}Error: words\n"
    (tmp_path / "launcher.log").write_text(f"Traceback\n  raise Rendezvous{error}Error\n{line}")
    told = describe_failure(tmp_path, 1)
    assert told.startswith("the machine of RDZV_ENDPOINT cannot be reached, or the run ended")
    # The words alone are no error.
    (tmp_path / "launcher.log").write_text(f"no Rendezvous{error}Error here\n")
    assert describe_failure(tmp_path, 1).startswith("the ranks ended with status 1")


def test_the_last_start_is_reported(tmp_path):
    """Errors before a restart are not those that ended the run."""
    for attempt, word in ((2, "old"), (10, "new")):
        folder = tmp_path / "run" / f"attempt_{attempt}" / "0"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"error: {word}\n")
    assert hidden_errors(tmp_path, {1}) == ["[rank0]:error: new"]
