# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Run pytest on copies of the repository, each run in a process forked from this one.

Importing torch takes most of the time of a short test, so the caller imports it once before
forking. The package must not be imported here: each run imports it from its copy.
"""

import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

PACKAGE = "torchtitan_lr"

_MOST_FILES = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """Result of a pytest run.

    Args:
        status: pytest's exit status; None if it returned none.
        failed: The tests and files that failed, in order.
        passed: Number of passed tests.
        note: Why there is no status, or the meaning of an unusual one.
    """

    status: int | None = None
    failed: tuple[str, ...] = ()
    passed: int = 0
    note: str = ""


def copy_repository(root: Path, copies: Sequence[Path]) -> None:
    """Copy the files that git tracks or would add, and compile them.

    The compiled files are validated by source hashes, because file times are too coarse to
    distinguish a mutant from the original text.
    """
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    listed = subprocess.run([*command, "--exclude-standard"], check=True, capture_output=True)
    first, *others = copies
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (root / name).is_file():
            (first / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, first / name)
    compiler = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    # Files that do not compile fail in the baseline.
    subprocess.run([*compiler, PACKAGE, "tests"], cwd=first, check=False)
    for other in others:
        shutil.copytree(first, other)


@dataclass(eq=False)
class Trial:
    """One run of pytest in its own process.

    Args:
        tests: pytest's ids of the tests.
        seconds: Time limit.
        path: A file of the repository to replace during the run, which then stops at the first
            failure.
        text: The replaced file's contents.
    """

    tests: list[str]
    seconds: float
    path: Path | None = None
    text: str = ""

    def start(self, copy: Path) -> None:
        """Change a copy of the repository and start the run in it."""
        self.copy, module = copy, ""
        if self.path is not None:
            self._original = (copy / self.path).read_text()
            (copy / self.path).write_text(self.text)
            module = ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")
        context = multiprocessing.get_context("fork")
        self.answer, theirs = context.Pipe(duplex=False)
        arguments = (copy, self.tests, module, theirs)
        self.process = context.Process(target=_run_tests, args=arguments)
        self.began = time.monotonic()
        self.process.start()
        theirs.close()

    def left(self) -> float:
        """Return the remaining seconds."""
        return max(0.0, self.began + self.seconds - time.monotonic())

    def ended(self) -> bool:
        """Return whether the process has sent a result, died, or reached its time limit."""
        return self.answer.poll() or not self.process.is_alive() or not self.left()

    def finish(self) -> Outcome:
        """End the process, restore the copy, and return the outcome."""
        outcome = Outcome(note=f"it took more than {self.seconds:g} seconds")
        if self.answer.poll() or not self.process.is_alive():
            try:
                outcome = Outcome(*self.answer.recv())
            except EOFError:
                outcome = Outcome(note="the tests' process died")
        pid = self.process.pid
        assert pid is not None
        try:
            os.killpg(pid, signal.SIGKILL)  # including processes that the tests left running
        except ProcessLookupError:  # it has not created its group yet
            self.process.kill()
        self.process.join()
        self.answer.close()
        if self.path is not None:
            (self.copy / self.path).write_text(self._original)
        return outcome


def run_trials(
    trials: Iterable[Trial], copies: Sequence[Path]
) -> Iterator[tuple[Trial, Outcome, float]]:
    """Run trials, as many at a time as there are copies; yield each with its outcome and seconds.

    Args:
        trials: What to run.
        copies: Copies of the repository.
    """
    waiting, free, running = list(trials)[::-1], list(copies), list[Trial]()
    try:
        while waiting or running:
            while waiting and free:
                running.append(waiting.pop())
                running[-1].start(free.pop())
            # A process may die without a result while its forked children keep the pipe open.
            wait([trial.answer for trial in running], min(1.0, *(t.left() for t in running)))
            for trial in [trial for trial in running if trial.ended()]:
                running.remove(trial)
                outcome = trial.finish()
                free.append(trial.copy)
                yield trial, outcome, time.monotonic() - trial.began
    finally:
        for trial in running:
            trial.finish()


class _Recorder:
    """A pytest plugin that records failures."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.when == "call" and report.passed
        self.pytest_collectreport(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


def _run_tests(copy: Path, tests: list[str], module: str, answer: Connection) -> None:
    """Run tests in this process, on the package of a copy, and send the fields of an `Outcome`."""
    os.setsid()
    with copy.with_suffix(".log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(copy)
    os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing plugins takes longer than a test
    here = Path(__file__).resolve()
    ours = ("", str(here.parent), str(here.parents[2]))
    os.environ.pop("PYTEST_ADDOPTS", None)  # set by the tests that started this process
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ours)]
    sys.dont_write_bytecode, sys.argv = True, ["pytest"]
    # Child processes of multiprocessing import the main module, which must not exist here.
    sys.modules["__main__"] = types.ModuleType("__main__")
    for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
        del sys.modules[name]  # the copy has its own modules
    importlib.invalidate_caches()
    try:
        package = importlib.import_module(PACKAGE)
        if copy not in Path(str(package.__file__)).parents:
            raise ImportError(f"{PACKAGE} came from {package.__file__}")
        if module:
            importlib.import_module(module)
        if not all(test.startswith("tests/unit/") for test in tests):
            importlib.import_module(f"{PACKAGE}.train")
            _start_fork_server()
    except BaseException as error:
        traceback.print_exc()
        answer.send((None, (), 0, f"it cannot be imported: {error!r}"))
        return
    import pytest

    recorder = _Recorder()
    options = [
        "-x" if module else "--continue-on-collection-errors",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    status = int(pytest.main([*options, *tests], plugins=[recorder]))
    answer.send((status, tuple(recorder.failed), recorder.passed))


def _start_fork_server() -> None:
    """Fork multiprocessing's fork server from this process, which has imported torch.

    A fork server that is started as usual would import torch again.
    """

    def fork(path: bytes, arguments: list[str], inherited: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            for low, high in pairwise([2, *sorted(inherited), _MOST_FILES]):
                os.closerange(low + 1, high)
            try:
                exec(arguments[-1], {})  # the argument of python -c
            finally:
                os._exit(0)
        return pid

    resource_tracker.ensure_running()  # first: it would otherwise be forked too
    with patch.object(util, "spawnv_passfds", fork):
        forkserver.ensure_running()
