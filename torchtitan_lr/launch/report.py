# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the launcher says at the end: the summary of a run, or why it failed."""

import errno
import json
import os
import re
import shutil
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torchtitan_lr.training.summary import SUMMARY_FILE

# What everybody needs to know: why a run was refused, how to resume it (only rank 0 says that).
_LAST_WORDS = re.compile(r"^error: |\bStopped by .* after step ")
_ENDED_BY_SIGNAL = re.compile(
    r"local_rank: (\d+)\)\n\s*exitcode\s*: -\d+ \(pid: (\d+)\)\s+\((SIG\w+)\)"
)
_FRAME = re.compile(r'File "([^"]+)", line \d+, in (\w+)')
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
DID_NOT_END = "did not end when asked to, and was killed"
"""End of a line of ``launcher.log`` that begins with ``rank process PID``."""
_TAIL_BYTES = 1 << 16
_LITTLE_SPACE = 1 << 20  # bytes: what is left where a write of less than a page more failed


def read_summary(dump_folder: Path, newer_than: float) -> dict[str, Any] | None:
    """Reads the summary a run wrote.

    Args:
        dump_folder: The run's ``job.dump_folder``.
        newer_than: Seconds since the epoch; an older file is another run's.

    Returns:
        The keys of ``summary.json``, or None if this run wrote none.
    """
    path = dump_folder / SUMMARY_FILE
    if not path.is_file() or path.stat().st_mtime < newer_than:
        return None
    summary: dict[str, Any] = json.loads(path.read_text())
    return summary


def summary_lines(summary: dict[str, Any], dump_folder: Path, log_folder: Path) -> list[str]:
    """Formats a summary for the console.

    Args:
        summary: The keys of ``summary.json``; losses in nats a token, memory in GiB.
        dump_folder: The run's ``job.dump_folder``.
        log_folder: Where the output of all ranks is.
    """

    def number(key: str, form: str, unit: str = "") -> str:
        value = summary.get(key)
        return "-" if value is None else format(value, form) + unit

    rows = (
        ("steps", number("steps", "d")),
        ("train loss", number("train_loss", ".4f", " nats/token")),
        ("validation loss", number("val_loss", ".4f", " nats/token")),
        ("unigram entropy", number("unigram_entropy", ".4f", " nats/token (validation tokens)")),
        ("validation perplexity", number("val_ppl", ".2f")),
        ("tokens/s", number("tokens_per_s", ",.0f", " (all ranks)")),
        ("MFU", number("mfu", ".2f", " %") if summary.get("mfu") is not None else "unknown peak"),
        ("peak memory", number("peak_memory_gib", ".2f", " GiB (largest rank)")),
        ("checkpoint", summary.get("checkpoint") or "none"),
        ("curve", summary.get("curve") or "none"),
        ("summary", dump_folder / SUMMARY_FILE),
        ("logs", log_folder),
    )
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def describe_failure(log_folder: Path, status: int) -> str:
    """Says in one line which rank failed first, why, and where the logs are.

    A rank that a signal ended wrote nothing; the others then fail too, with errors of the network
    that say nothing of the cause. So it is asked for first.

    Args:
        log_folder: Where torchrun wrote each rank's folder, and the launcher torchrun's output.
        status: Exit status of the command.
    """
    killed = killed_rank(log_folder)
    if killed is not None:
        rank, name = killed
        (folder, *_) = [*log_folder.glob(f"*/attempt_*/{rank}"), log_folder]
        hint = " (which is also what the kernel sends when memory runs out)"
        hint = hint if name == "SIGKILL" else ""
        return f"rank {rank} was ended by {name}{hint}; its output: {folder}"
    failures = []
    for path in log_folder.glob("*/attempt_*/*/error.json"):
        try:
            message = json.loads(path.read_text())["message"]
            when = float(message["extraInfo"]["timestamp"])
            stack = str(message["extraInfo"].get("py_callstack"))
            failures.append((when, path.parent, str(message["message"]), stack))
        except (ValueError, KeyError, TypeError):
            continue  # a rank killed while writing leaves half a file
    if failures:
        _, folder, reason, stack = min(failures)
        what = reason.strip().partition("\n")[0]
        if _TIMED_OUT.search(what):
            what += _collective_of(stack)
        stuck = [f"rank {rank}" for rank, _, did_not_end in _signalled(log_folder) if did_not_end]
        if stuck:
            what += f"; {', '.join(stuck)} did not end when asked to: stopped, or stuck"
        return f"rank {folder.name} failed: {what}; its output: {folder}"
    if status < 0:
        name = signal.Signals(-status).name
        return f"torchrun was ended by {name}, and its ranks with it; their output: {log_folder}"
    return f"the ranks ended with status {status}; their output: {log_folder}"


def full_disk(folder: Path, failure: str) -> str:
    """Says that a disk is full, where that is or was so; then ranks can hardly say why they ended.

    Args:
        folder: On that disk.
        failure: What is known of the failure.

    Returns:
        The end of a sentence, empty where there is space.
    """
    free = shutil.disk_usage(folder).free
    said = (os.strerror(number) in failure for number in (errno.ENOSPC, errno.EDQUOT))
    if free >= _LITTLE_SPACE and not any(said):
        return ""
    return f"; no space left in {folder} ({free / 2**20:.1f} MiB free)"


def killed_rank(log_folder: Path) -> tuple[int, str] | None:
    """Finds in torchrun's report a rank that a signal ended which torchrun did not send.

    A rank that told its error before, and fell while it cleaned up, does not count. Nor does one
    that torchrun killed because it did not end after another had failed.

    Args:
        log_folder: Holds ``launcher.log``.

    Returns:
        The rank on this machine and the signal's name, or None.
    """
    for rank, name, did_not_end in _signalled(log_folder):
        told = any(log_folder.glob(f"*/attempt_*/{rank}/error.json"))
        if name != "SIGTERM" and not told and not did_not_end:  # SIGTERM is torchrun's own
            return rank, name
    return None


def _signalled(log_folder: Path) -> list[tuple[int, str, bool]]:
    """Ranks that a signal ended, its name, and whether torchrun had to kill the rank."""
    path = log_folder / "launcher.log"
    report = path.read_text(errors="replace") if path.is_file() else ""
    return [
        (int(rank), name, f"rank process {pid} {DID_NOT_END}" in report)
        for rank, pid, name in _ENDED_BY_SIGNAL.findall(report)
    ]


def _collective_of(stack: str) -> str:
    """Names the collective of a stack, and who of us called it, as the end of a phrase."""
    calls = _FRAME.findall(stack)
    ours = [i for i, (file, _) in enumerate(calls) if "/torchtitan_lr/" in file]
    if not ours:
        return ""
    file, caller = calls[ours[-1]]
    # What is called first says most; below it are torch's own waits and wrappers.
    below = [name for path, name in calls[ours[-1] + 1 :] if "/distributed/" in path]
    collectives = [f" in {name}" for name in below if name != "wrapper"]
    return f"{''.join(collectives[:1])} ({Path(file).name}: {caller})"


def last_words(log_folder: Path, shown: Collection[int]) -> list[str]:
    """Finds in the ranks' output why they ended, unless a rank on the console said so.

    The first rank that fails ends the others: any of them may be the only one that reports.

    Args:
        log_folder: Where torchrun wrote each rank's folder.
        shown: Ranks of this machine whose output is on the console.

    Returns:
        The lines of the lowest rank that said why it ended, or how to resume, with its prefix.
    """
    words: dict[int, list[str]] = {}
    for path in sorted(log_folder.glob("*/attempt_*/*/std*.log")):
        if lines := _last_words_of(path):
            rank = int(path.parent.name)
            words[rank] = words.get(rank, []) + [f"[rank{rank}]:{line}" for line in lines]
    if not words or words.keys() & set(shown):
        return []
    return words[min(words)]


def _last_words_of(path: Path) -> list[str]:
    with path.open("rb") as file:
        # They are the last things said; a long run's output is not read as a whole.
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    return [line for line in lines if _LAST_WORDS.search(line)]
