# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
r"""Apply one fault at a time to the package and run the tests that must detect it.

The mutants are data: `scripts/check/mutants/*.toml`. Each has a text that occurs exactly once in
the package, its replacement, and the tests of which one must fail. Tests run in copies of the
repository in a temporary folder; the working tree is only read.

    python scripts/check/mutants.py --jobs 2
    python scripts/check/mutants.py --only "loss" --skip-baseline

The script prints one line per mutant: ``killed`` if a test failed, ``survived`` if all passed,
``broken`` if the mutant is not valid (its text does not occur exactly once, the module does not
import, no test ran, or the time limit was reached). First all tests of the list run once without a
mutant and must pass.

Exit status: 0 all are killed, 1 one survived or is broken, 2 the arguments or a list are wrong.
"""

import argparse
import ast
import gc
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NoReturn

import tomli

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # scripts/ is a folder of programs, not a package

from scripts.check.trials import PACKAGE, Outcome, Trial, copy_repository, run_trials  # noqa: E402

LISTS = "scripts/check/mutants"

PRELOAD = "pytest,hypothesis,torch._dynamo,torchtitan.train"
"""Modules imported once before forking; none of the package itself."""

KILLED, SURVIVED, BROKEN = "killed", "survived", "broken"

Texts = Mapping[Path, str]
"""Text of each package file by its path in the repository."""


class ListError(Exception):
    """A list of mutants that cannot be read."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Args:
        what: Description of the fault; unique.
        old: Text of the package.
        new: Its replacement.
        tests: Files, optionally with ``::function``, of which one must fail.
        source: Name of the mutant's list.
    """

    what: str
    old: str
    new: str
    tests: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Result:
    """Result of a mutant: `KILLED`, `SURVIVED` or `BROKEN`, with the failed test or the reason."""

    mutant: Mutant
    verdict: str
    detail: str
    seconds: float = 0.0

    def line(self) -> str:
        """Return the line that is printed."""
        by = "by" if self.verdict == KILLED else "-"
        return f"{self.verdict:8} {self.seconds:5.1f}s  {self.mutant.what}  {by} {self.detail}"


def read_mutants(root: Path) -> list[Mutant]:
    """Read all lists of a repository.

    Raises:
        ListError: A file is not valid TOML, a key is missing or unknown, or two mutants have the
            same name.
    """
    mutants: list[Mutant] = []
    for path in sorted((root / LISTS).glob("*.toml")):
        try:
            content = tomli.loads(path.read_text())
            for item in content.pop("mutant", []):
                mutants.append(Mutant(**item | {"tests": tuple(item["tests"])}, source=path.name))
        except (tomli.TOMLDecodeError, TypeError, KeyError) as error:
            raise ListError(f"{path.name}: {error}") from error
        if content:
            raise ListError(f"{path.name}: only [[mutant]] is known, not {', '.join(content)}")
    names = [mutant.what for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ListError(f"more than one mutant is called {twice[0]!r}")
    return mutants


def read_package(root: Path) -> dict[Path, str]:
    """Return the texts of the package."""
    paths = sorted((root / PACKAGE).rglob("*.py"))
    return {path.relative_to(root): path.read_text() for path in paths}


def find_text(texts: Texts, text: str) -> list[Path]:
    """Return the files that contain a text, repeated once per occurrence."""
    return [path for path, whole in texts.items() for _ in range(whole.count(text))]


def find_tests(root: Path, name: str) -> list[str]:
    """Return pytest's ids of the tests for a name in a list, unit tests first.

    Args:
        root: The repository.
        name: ``test_x.py`` or ``test_x.py::test_f``; folders may precede it.
    """
    file, _, function = name.partition("::")
    found = []
    for path in sorted(root.glob("tests/**/*.py"), reverse=True):
        parts, wanted = path.relative_to(root).parts, Path(file).parts
        if parts[-len(wanted) :] != wanted:
            continue
        if not function or function.partition("[")[0] in _tests_of(path):
            found.append("/".join(parts) + (f"::{function}" if function else ""))
    return found


@cache  # many mutants name the same files
def _tests_of(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [child.name for child in node.body if isinstance(child, ast.FunctionDef)]
            names |= {node.name, *(f"{node.name}::{name}" for name in inner)}
    return names


def what_is_wrong(mutant: Mutant, texts: Texts, root: Path) -> str:
    """Return why a mutant is not valid, or an empty string."""
    places = find_text(texts, mutant.old)
    if len(places) != 1:
        return f"its text occurs {len(places)} times"
    missing = [name for name in mutant.tests if not find_tests(root, name)]
    if missing or not mutant.tests:
        return f"there is no test {', '.join(missing)}".rstrip()
    if mutant.old == mutant.new:
        return "it changes nothing"
    try:
        compile(texts[places[0]].replace(mutant.old, mutant.new), places[0].name, "exec")
    except SyntaxError as error:
        return f"it is not valid Python: {error.msg}"
    return ""


def changed_files(root: Path, revision: str) -> set[Path]:
    """Return the files that differ from a git revision, by their paths in the repository."""
    command = ["git", "-C", str(root), "diff", "--name-only", "-z", revision, "--"]
    listed = subprocess.run(command, check=True, capture_output=True)
    return {Path(name) for name in listed.stdout.decode().split("\0") if name}


def judge(mutant: Mutant, outcome: Outcome, seconds: float) -> Result:
    """Return a mutant's result for an outcome."""
    if outcome.status == 1:
        return Result(mutant, KILLED, outcome.failed[0].removeprefix("tests/"), seconds)
    if outcome.status == 0 and outcome.passed:
        return Result(mutant, SURVIVED, ", ".join(mutant.tests), seconds)
    note = "every test was skipped" if outcome.status == 0 else outcome.note
    return Result(mutant, BROKEN, note or f"pytest's exit status is {outcome.status}", seconds)


def run_baseline(tests: Iterable[str], copies: Sequence[Path], seconds: float) -> list[str]:
    """Run tests without a mutant.

    Args:
        tests: pytest's ids.
        copies: Copies of the repository.
        seconds: Time limit per file.

    Returns:
        The failed tests or, if pytest itself failed, all its tests.
    """
    by_folder: dict[str, list[str]] = {}
    for test in sorted(tests):
        by_folder.setdefault(test.rpartition("/")[0], []).append(test)
    trials = [Trial(names, seconds * len(names)) for names in by_folder.values()]
    failed: list[str] = []
    for trial, outcome, _ in run_trials(trials, copies):
        failed += outcome.failed if outcome.status in (0, 1) else trial.tests
    return failed


def run_mutants(
    mutants: Sequence[Mutant], copies: Sequence[Path], seconds: float, baseline: bool = True
) -> Iterator[Result]:
    """Run mutants and yield each result as soon as it is known.

    Args:
        mutants: The mutants.
        copies: Copies of the repository, one per process.
        seconds: Time limit per mutant.
        baseline: Whether to run the tests without a mutant first.
    """
    root, texts = copies[0], read_package(copies[0])
    wrong = {mutant: what_is_wrong(mutant, texts, root) for mutant in mutants}
    tests = {
        mutant: [test for name in mutant.tests for test in find_tests(root, name)]
        for mutant in mutants
    }
    failed = []
    if baseline:
        whole = {test for mutant, names in tests.items() if not wrong[mutant] for test in names}
        failed = run_baseline(whole, copies, seconds)
    for mutant, names in tests.items():
        for name in names:
            if any(_concerns(name, what) for what in failed):
                wrong[mutant] = wrong[mutant] or f"{name} fails without it"
    yield from (Result(mutant, BROKEN, why) for mutant, why in wrong.items() if why)
    trials = {_trial(m, tests[m], texts, seconds): m for m in mutants if not wrong[m]}
    for trial, outcome, took in run_trials(trials, copies):
        yield judge(trials[trial], outcome, took)


def _concerns(name: str, failed: str) -> bool:
    """Return whether a failure is of a test, of one of its cases, or of collecting its file."""
    return failed in (name, name.partition("::")[0]) or failed.startswith((f"{name}::", f"{name}["))


def _trial(mutant: Mutant, tests: list[str], texts: Texts, seconds: float) -> Trial:
    (path,) = find_text(texts, mutant.old)
    return Trial(tests, seconds, path, texts[path].replace(mutant.old, mutant.new))


def choose(mutants: Iterable[Mutant], root: Path, only: str, since: str) -> list[Mutant]:
    """Return the selected mutants.

    Args:
        mutants: All.
        root: The repository.
        only: Part of a mutant's description, or of its list's or file's name; "" for all.
        since: A git revision: only mutants in files that changed since then; "" for all. Mutants
            whose text does not occur exactly once are always included.
    """
    texts = read_package(root)
    changed = changed_files(root, since) if since else set()
    chosen = []
    for mutant in mutants:
        places = find_text(texts, mutant.old)
        names = (mutant.what, mutant.source, *(place.as_posix() for place in places))
        unclear = len(places) != 1
        if any(only in name for name in names) and (
            not since or unclear or not changed.isdisjoint(places)
        ):
            chosen.append(mutant)
    return chosen


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, and keeps the description's line breaks."""


class _Parser(argparse.ArgumentParser):
    """As OneLineParser of the commands; this process must not import the package."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def _arguments() -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=_Help)
    parser.add_argument("--only", default="", metavar="TEXT", help="part of a name, list or file")
    parser.add_argument("--changed-since", default="", metavar="REV", help="only in changed files")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="parallel processes")
    parser.add_argument("--skip-baseline", action="store_true", help="assume that the tests pass")
    parser.add_argument("--seconds", type=float, default=600, help="time limit per mutant")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    parser.add_argument("--preload", default=PRELOAD, help="modules to import once")
    return parser.parse_args()


def main() -> int:
    """Run the command; return the exit status."""
    arguments = _arguments()
    root = arguments.root.resolve()
    try:
        mutants = choose(read_mutants(root), root, arguments.only, arguments.changed_since)
    except ListError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: {error.stderr.decode().strip()}", file=sys.stderr)
        return 2
    if arguments.only and not mutants:
        print(f"error: no mutant, list or file is called {arguments.only!r}", file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(f"{mutant.source}: {mutant.what}" for mutant in mutants))
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for module in arguments.preload.split(","):
        importlib.import_module(module)
    gc.freeze()  # so that no collection in a forked process touches, and thus copies, these objects
    counts = dict.fromkeys((KILLED, SURVIVED, BROKEN), 0)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [Path(folder).resolve() / f"copy-{i}" for i in range(max(1, arguments.jobs))]
        copy_repository(root, copies)
        for result in run_mutants(mutants, copies, arguments.seconds, not arguments.skip_baseline):
            print(result.line(), flush=True)
            counts[result.verdict] += 1
    gc.unfreeze()  # otherwise the interpreter reports leaks at exit
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(counts[SURVIVED] + counts[BROKEN] > 0)


if __name__ == "__main__":
    sys.exit(main())
