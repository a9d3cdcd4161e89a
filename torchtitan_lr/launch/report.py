# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The launcher's final report: the summary of a run, or the cause of its failure."""

import errno
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lr.config.files import read_json
from torchtitan_lr.errors import OUT_OF_MEMORY, escaped
from torchtitan_lr.launch.processes import RANK_STARTED
from torchtitan_lr.training.history import SUMMARY_FILE, is_number

# Lines that must reach the console: error messages, and how to resume (printed by rank 0 only).
_FINAL_LINE = re.compile(r"^error: |\bStopped by .* after step ")
# Before torch 2.13 the line ends here; later the signal's name follows.
_ENDED_BY_SIGNAL = re.compile(r"local_rank: (\d+)\)\n\s*exitcode\s*: -(\d+) \(pid: (\d+)\)")
_FRAME = re.compile(r'File "([^"]+)", line \d+, in (\w+)')
_STARTED = re.compile(RANK_STARTED + r" (\d+) \(local_rank: (\d+)\)")
_LOST_RENDEZVOUS = re.compile(r"^\S*Rendezvous(Connection|Closed|Timeout)Error", re.MULTILINE)
_LOST_CONNECTION = re.compile(
    r"connection (was )?(reset|closed|refused)|broken pipe", re.IGNORECASE
)
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
DID_NOT_END = "did not end on SIGTERM, and was killed"
"""End of the ``launcher.log`` line ``rank process PID ...`` of a rank that torchrun killed."""
_NAMES = {number.value: number.name for number in signal.Signals}
_LESS_MEMORY = "a smaller training.local_batch_size or training.seq_len needs less"
_UNREACHABLE = "the machine of RDZV_ENDPOINT cannot be reached, or the run ended there"
_OTHER_RANK = "another rank ended before, or cannot be reached"
_TAIL_BYTES = 1 << 16
_SHARED_MEMORY = "/dev/shm"
_LITTLE_SPACE = 1 << 20  # bytes; a disk with less free space counts as full


def read_summary(dump_folder: Path, newer_than: float) -> dict[str, Any] | None:
    """Read the summary of a run.

    Args:
        dump_folder: The run's ``job.dump_folder``.
        newer_than: Seconds since the epoch; an older file belongs to another run.

    Returns:
        The keys of ``summary.json``, or None if this run wrote none.
    """
    path = dump_folder / SUMMARY_FILE
    try:
        return read_json(path) if path.stat().st_mtime >= newer_than else None
    except (OSError, ValueError):  # there is none, or it is damaged
        return None


def summary_lines(summary: dict[str, Any], dump_folder: Path, log_folder: Path) -> list[str]:
    """Format a summary for the console.

    Args:
        summary: The keys of ``summary.json``; losses in nats per token, memory in GiB.
        dump_folder: The run's ``job.dump_folder``.
        log_folder: Where the output of all ranks is.
    """

    def number(key: str, form: str, unit: str = "") -> str:
        value = summary.get(key)
        if not is_number(value) or (form == "d" and not isinstance(value, int)):
            return "-"  # unknown, or the file is damaged
        return format(value, form) + unit

    sent: list[tuple[str, str]] = []
    if all(is_number(summary.get(key)) for key in ("sent_bytes", "adamw_bytes")):
        own, adamw = (f"{summary[key] / 1e6:.1f}" for key in ("sent_bytes", "adamw_bytes"))
        sent.append(("gradients sent", f"{own} MB per step by formula (AdamW {adamw})"))
    rows = (
        ("steps", number("steps", "d")),
        ("train loss", number("train_loss", ".4f", " nats/token")),
        ("validation loss", number("val_loss", ".4f", " nats/token")),
        ("unigram entropy", number("unigram_entropy", ".4f", " nats/token (validation tokens)")),
        ("validation perplexity", number("val_ppl", ".2f")),
        ("tokens/s", number("tokens_per_s", ",.0f", " (all ranks)")),
        ("MFU", number("mfu", ".2f", " %") if summary.get("mfu") is not None else "unknown peak"),
        ("peak memory", number("peak_memory_gib", ".2f", " GiB (largest rank)")),
        *sent,
        ("checkpoint", summary.get("checkpoint") or "none"),
        ("curve", summary.get("curve") or "none"),
        ("summary", dump_folder / SUMMARY_FILE),
        ("logs", log_folder),
    )
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {escaped(str(value))}" for name, value in rows]


@dataclass(frozen=True)
class Failure:
    """Why the ranks of this machine failed.

    Attributes:
        what: The cause in one line, with the rank.
        output: Where its output is.
        rank: The rank that failed first, None if that is unknown.
        by_signal: Whether a signal ended it, which no rank could record.
    """

    what: str
    output: Path
    rank: int | None = None
    by_signal: bool = False

    def __str__(self) -> str:
        of = "its" if self.rank is not None else "their"
        return f"{self.what}; {of} output: {self.output}"


def describe_failure(log_folder: Path, status: int) -> Failure:
    """Find which rank failed first, why, and where the logs are.

    A rank that was ended by a signal writes no error; the other ranks then fail with network errors
    that hide the cause. Therefore this looks for such a rank first. torchrun's folders have the
    numbers of this machine's ranks, the line those of the run's.
    """
    lost = _LOST_RENDEZVOUS.search(_launcher_log(log_folder)) is not None
    found = _ended_by_signal(log_folder) or _failed_with_error(log_folder, lost)
    if found is not None:
        return found
    what = f"the ranks ended with status {status}"
    if lost:
        what = _UNREACHABLE
    elif status < 0:
        what = f"torchrun was ended by {signal.Signals(-status).name}, and its ranks with it"
    return Failure(what, log_folder, by_signal=status < 0)


def _ended_by_signal(log_folder: Path) -> Failure | None:
    """Return the first rank that a signal ended; None if there is none."""
    killed = killed_rank(log_folder)
    if killed is None:
        return None
    here, name = killed
    rank = _first_rank(log_folder) + here
    (folder, *_) = [*_of_last_start(log_folder, f"{here}"), log_folder]
    hint = ""
    if name == "SIGKILL":
        hint = f" (the kernel also sends it when memory runs out: {_LESS_MEMORY})"
    return Failure(f"rank {rank} was ended by {name}{hint}", folder, rank, by_signal=True)


def _failed_with_error(log_folder: Path, lost: bool) -> Failure | None:
    """Return the first rank that wrote an error; None if none did."""
    failures = []
    for path in _of_last_start(log_folder, "*/error.json"):
        try:
            message = read_json(path)["message"]
            when = float(message["extraInfo"]["timestamp"])
            stack = str(message["extraInfo"].get("py_callstack"))
            failures.append((when, path.parent, str(message["message"]), stack))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a rank that was killed while writing leaves an incomplete file
    if not failures:
        return None
    _, folder, reason, stack = min(failures)
    what = reason.strip().partition("\n")[0]
    if _TIMED_OUT.search(what):
        what += _collective_of(stack)
    if OUT_OF_MEMORY.search(what):
        what += f"; {_LESS_MEMORY}"
    if _LOST_CONNECTION.search(what):
        what += f"; {_UNREACHABLE if lost else _OTHER_RANK}"
    first_rank, signalled = _first_rank(log_folder), _signalled(log_folder)
    stuck = [f"rank {first_rank + rank}" for rank, _, did_not_end in signalled if did_not_end]
    if stuck:
        what += f"; {', '.join(stuck)} did not end on SIGTERM: stopped, or stuck"
    rank = first_rank + int(folder.name)
    return Failure(f"rank {rank} failed: {what}", folder, rank)


def disk_trouble(folder: Path, failure: str) -> str:
    """Return a hint if a folder cannot be written, or its disk is or was full.

    Ranks often cannot report this themselves.

    Returns:
        The end of a sentence, empty if the folder can be written.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return f"; {folder} cannot be written ({error.strerror})"
    free = shutil.disk_usage(folder).free
    reported = any(os.strerror(number) in failure for number in (errno.ENOSPC, errno.EDQUOT))
    if free >= _LITTLE_SPACE and not reported:
        return ""
    # torch names a file of shared memory so.
    if free >= _LITTLE_SPACE and any(name in failure for name in (_SHARED_MEMORY, "</torch_")):
        return (
            f"; no space left in {_SHARED_MEMORY}: fewer training.dataloader.num_workers, or more"
        )
    return f"; no space left in {folder} ({free / 2**20:.1f} MiB free)"


def killed_rank(log_folder: Path) -> tuple[int, str] | None:
    """Find a rank in torchrun's report that was ended by a signal from outside torchrun.

    Excluded are ranks that reported an error before the signal (a crash during cleanup), and ranks
    that torchrun killed because they did not end after another rank had failed.

    Returns:
        The rank on this machine and the signal's name, or None.
    """
    for rank, name, did_not_end in _signalled(log_folder):
        reported = bool(_of_last_start(log_folder, f"{rank}/error.json"))
        if name != "SIGTERM" and not reported and not did_not_end:  # torchrun sends SIGTERM
            return rank, name
    return None


def _first_rank(log_folder: Path) -> int:
    """Return the first rank of this machine in the last start; 0 if there was none."""
    *_, (rank, local_rank) = [("0", "0"), *_STARTED.findall(_launcher_log(log_folder))]
    return int(rank) - int(local_rank)


def _of_last_start(log_folder: Path, pattern: str) -> list[Path]:
    """Return the files of the ranks' last start that match a pattern, in order.

    torchrun numbers the folder ``attempt_N`` by the failures before it.
    """
    attempts = log_folder.glob("*/attempt_*")
    last = max(attempts, key=lambda path: int(path.name.rpartition("_")[2]), default=log_folder)
    return sorted(last.glob(pattern))


def _signalled(log_folder: Path) -> list[tuple[int, str, bool]]:
    """Return the ranks ended by a signal, the signal's name, and whether torchrun killed them."""
    report = _launcher_log(log_folder)
    return [
        (int(rank), _NAMES[int(number)], f"rank process {pid} {DID_NOT_END}" in report)
        for rank, number, pid in _ENDED_BY_SIGNAL.findall(report)
        if int(number) in _NAMES
    ]


def _launcher_log(log_folder: Path) -> str:
    path = log_folder / "launcher.log"
    return path.read_text(errors="replace") if path.is_file() else ""


def _collective_of(stack: str) -> str:
    """Return a stack's collective and its caller in this package, as the end of a phrase."""
    calls = _FRAME.findall(stack)
    ours = [i for i, (file, _) in enumerate(calls) if "/torchtitan_lr/" in file]
    if not ours:
        return ""
    file, caller = calls[ours[-1]]
    # Report the outermost call; below it are torch's own waits and wrappers.
    below = [name for path, name in calls[ours[-1] + 1 :] if "/distributed/" in path]
    collectives = [f" in {name}" for name in below if name != "wrapper"]
    return f"{''.join(collectives[:1])} ({Path(file).name}: {caller})"


def hidden_errors(log_folder: Path, shown: Collection[int]) -> list[str]:
    """Return the final error lines of the ranks, unless a rank on the console printed them.

    The first rank that fails ends the others, so any single rank may be the only one that reports.

    Returns:
        The lines of the lowest rank that printed an error or how to resume, with its prefix.
    """
    errors: dict[int, list[str]] = {}
    first_rank = _first_rank(log_folder)
    for path in _of_last_start(log_folder, "*/std*.log"):
        with path.open("rb") as file:
            # The lines are at the end; do not read the whole output of a long run.
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            tail = file.read().decode("utf-8", errors="replace").splitlines()
        if lines := [line for line in tail if _FINAL_LINE.search(line)]:
            rank = int(path.parent.name)
            prefix = f"[rank{first_rank + rank}]:"
            errors[rank] = errors.get(rank, []) + [prefix + line for line in lines]
    if not errors or errors.keys() & set(shown):
        return []
    return errors[min(errors)]
