# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/check/mutants.py`` on a small repository, and its lists against this one."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from scripts.check.mutants import (
    LISTS,
    Mutant,
    _concerns,
    find_tests,
    read_mutants,
    read_package,
    what_is_wrong,
)
from tests.commands import ROOT

SCRIPT = ROOT / "scripts/check/mutants.py"

PACKAGE = """
def double(x: int) -> int:
    return 2 * x

def halve(x: int) -> int:
    return x // 2

def twice_two() -> int:
    return double(2)
"""
TESTS = """
import subprocess
import sys

import pytest

from torchtitan_lr.maths import double, halve

def test_double():
    assert double(3) == 6

def test_halve():
    assert halve(6) == 3

def test_in_another_process():
    code = "from torchtitan_lr.maths import double; raise SystemExit(double(3))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 6

@pytest.mark.skip(reason="never")
def test_skipped():
    pass

class TestClass:
    def test_inside(self):
        assert halve(4) == 2

def test_fails():
    assert double(1) == 3
"""
RANKS = """
import multiprocessing

from torchtitan_lr.maths import double

def test_in_a_fork_server():
    context = multiprocessing.get_context("forkserver")
    with context.Pool(2) as pool:
        assert pool.map(double, [3, 4]) == [6, 8]
"""


def mutant(what: str, old: str, new: str, *tests: str) -> str:
    names = ", ".join(f'"{test}"' for test in tests)
    return f"[[mutant]]\nwhat = '{what}'\nold = '{old}'\nnew = '''{new}'''\ntests = [{names}]\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one module and its tests, as git knows it."""
    files = {
        "torchtitan_lr/__init__.py": "",
        "torchtitan_lr/maths.py": PACKAGE,
        "tests/__init__.py": "",
        "tests/unit/__init__.py": "",
        "tests/unit/test_maths.py": TESTS,
        "tests/distributed/__init__.py": "",
        "tests/distributed/test_ranks.py": RANKS,
        "torchtitan_lr/train.py": "",
        "tests/unit/test_torn.py": "import nowhere\n\ndef test_it(): ...\n",
        ".gitignore": "ignored.py\n",
        "torchtitan_lr/ignored.py": "2 * x",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    return tmp_path


def run(repository: Path, mutants: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a list; the repository stays as it was."""
    (repository / LISTS).mkdir(parents=True, exist_ok=True)
    (repository / LISTS / "list.toml").write_text(mutants)
    before = contents(repository)
    command = [sys.executable, str(SCRIPT), f"--root={repository}", "--preload=pytest"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert contents(repository) == before
    return done


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts}


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    """Return verdict and detail by what a mutant is called."""
    matches = [re.fullmatch(LINE, line) for line in done.stdout.splitlines()[:-1]]
    assert all(matches), done.stdout + done.stderr
    return {match[2]: (match[1], match[3]) for match in matches if match}


LINE = r"(\w+) +[\d.]+s  (.*)  (?:by|-) (.*)"


def test_a_failure_concerns_a_test_its_cases_and_its_file() -> None:
    assert _concerns("t.py::test_a", "t.py::test_a")
    assert _concerns("t.py::test_a", "t.py::test_a[1]")
    assert _concerns("t.py::test_a", "t.py") and _concerns("t.py", "t.py::test_a")
    assert not _concerns("t.py::test_a", "t.py::test_ab")
    assert not _concerns("t.py::test_a[1]", "t.py::test_a[12]")


@pytest.mark.parametrize("jobs", [1, 2])
def test_killed_and_survived(jobs: int, repository: Path) -> None:
    name = "test_maths.py::test_"
    done = run(
        repository,
        mutant("a sum", "2 * x", "2 + x", f"{name}double")
        # Of equal length and written at once: a compiled file must not stand in for it.
        + mutant("a third", "2 * x", "3 * x", f"{name}halve", f"{name}double")
        + mutant("of a class", "x // 2", "x // 3", f"{name}skipped", "test_maths.py::TestClass")
        + mutant("in a process", "2 * x", "4 * x", f"{name}in_another_process")
        + mutant("in a fork server", "2 * x", "5 * x", "test_ranks.py")
        + mutant("another test", "2 * x", "7 * x", f"{name}halve"),
        f"--jobs={jobs}",
    )
    assert done.returncode == 1
    assert verdicts(done) == {
        "a sum": ("killed", "unit/test_maths.py::test_double"),
        "a third": ("killed", "unit/test_maths.py::test_double"),
        "of a class": ("killed", "unit/test_maths.py::TestClass::test_inside"),
        "in a process": ("killed", "unit/test_maths.py::test_in_another_process"),
        "in a fork server": ("killed", "distributed/test_ranks.py::test_in_a_fork_server"),
        "another test": ("survived", "test_maths.py::test_halve"),
    }
    assert done.stdout.splitlines()[-1] == "5 killed, 1 survived, 0 broken"


def test_broken(repository: Path) -> None:
    name = "test_maths.py::test_"
    done = run(
        repository,
        mutant("not there", "3 * x", "2", f"{name}double")
        + mutant("twice", "int:", "int :", f"{name}double")
        + mutant("no change", "2 * x", "2 * x", f"{name}double")
        + mutant("no Python", "2 * x", "2 *", f"{name}double")
        + mutant("no import", "def halve", "nowhere()\ndef halve", f"{name}double")
        + mutant("no file", "2 * x", "x", "test_math.py::test_double")
        + mutant("no function", "2 * x", "x", f"{name}treble")
        + mutant("no test", "2 * x", "x")
        + mutant("no run", "2 * x", "x", f"{name}skipped")
        + mutant("torn", "2 * x", "x", "test_torn.py")
        + mutant("failing", "2 * x", "x", f"{name}double", f"{name}fails")
        + mutant("good", "2 * x", "x", f"{name}double"),
    )
    assert done.returncode == 1
    assert verdicts(done) == {
        "not there": ("broken", "its text occurs 0 times"),
        "twice": ("broken", "its text occurs 3 times"),
        "no change": ("broken", "it changes nothing"),
        "no Python": ("broken", "it is not valid Python: invalid syntax"),
        "no import": (
            "broken",
            "it cannot be imported: NameError(\"name 'nowhere' is not defined\")",
        ),
        "no file": ("broken", "there is no test test_math.py::test_double"),
        "no function": ("broken", f"there is no test {name}treble"),
        "no test": ("broken", "there is no test"),
        "no run": ("broken", "every test was skipped"),
        "torn": ("broken", "tests/unit/test_torn.py fails without it"),
        "failing": ("broken", "tests/unit/test_maths.py::test_fails fails without it"),
        "good": ("killed", "unit/test_maths.py::test_double"),
    }


def test_without_a_baseline(repository: Path) -> None:
    done = run(
        repository,
        mutant("failing", "2 * x", "x", "test_maths.py::test_fails")
        + mutant("torn", "2 * x", "x", "test_torn.py"),
        "--skip-baseline",
    )
    assert verdicts(done) == {
        "failing": ("killed", "unit/test_maths.py::test_fails"),
        "torn": ("broken", "pytest's exit status is 2"),
    }


def test_time_is_up(repository: Path) -> None:
    endless = mutant("endless", "return 2 * x", "while True: pass", "test_maths.py::test_double")
    done = run(repository, endless, "--seconds=1", "--skip-baseline")
    assert verdicts(done) == {"endless": ("broken", "it took more than 1 seconds")}
    assert done.returncode == 1


def test_all_killed(repository: Path) -> None:
    done = run(repository, mutant("a sum", "2 * x", "2 + x", "test_maths.py::test_double"))
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "1 killed, 0 survived, 0 broken"


def test_choice(repository: Path) -> None:
    (repository / "torchtitan_lr/ignored.py").unlink()
    (repository / "torchtitan_lr/other.py").write_text("ONE = 1\n")
    subprocess.run(["git", "-C", str(repository), "add", "."], check=True)
    mutants = (
        mutant("a sum", "2 * x", "2 + x", "test_maths.py")
        + mutant("a two", "ONE = 1", "ONE = 2", "test_maths.py")
        + mutant("gone", "TWO = 2", "TWO = 1", "test_maths.py")
    )

    def chosen(*options: str) -> list[str]:
        done = run(repository, mutants, "--list", *options)
        assert done.returncode == 0, done.stderr
        return [line.removeprefix("list.toml: ") for line in done.stdout.splitlines()]

    assert chosen() == ["a sum", "a two", "gone"]
    assert chosen("--only=a ") == ["a sum", "a two"]
    assert chosen("--only=other.py") == ["a two"]
    assert chosen("--only=list.toml") == ["a sum", "a two", "gone"]
    # One whose text is not there any more may have been in what changed.
    assert chosen("--changed-since=HEAD") == ["a two", "gone"]


@pytest.mark.parametrize(
    ("mutants", "message"),
    [
        ("[[mutant]", "list.toml: "),
        ("[[mutant]]\nwhat = 'a'", "list.toml: 'tests'"),
        (mutant("a", "b", "c", "d") + "more = 1", "list.toml: .*unexpected keyword.*'more'"),
        (
            mutant("a", "b", "c", "d") + "[more]",
            r"list.toml: only \[\[mutant\]\] is known, not more",
        ),
        (mutant("a", "b", "c", "d") * 2, "more than one mutant is called 'a'"),
    ],
)
def test_lists_that_cannot_be_read(repository: Path, mutants: str, message: str) -> None:
    done = run(repository, mutants)
    assert done.returncode == 2
    assert re.match(f"error: {message}", done.stderr)


@pytest.mark.parametrize("option", ["--changed-since=nowhere", "--only=nowhere"])
def test_what_is_asked_for_is_not_there(repository: Path, option: str) -> None:
    done = run(repository, mutant("a", "b", "c", "d"), option)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "nowhere" in done.stderr
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_tests_are_found_by_name(repository: Path) -> None:
    (repository / "tests/distributed/test_maths.py").write_text("def test_ranks(): ...\n")
    units, ranks = "tests/unit/test_maths.py", "tests/distributed/test_maths.py"
    assert find_tests(repository, "test_maths.py") == [units, ranks]
    assert find_tests(repository, "distributed/test_maths.py") == [ranks]
    assert find_tests(repository, "test_maths.py::test_ranks[a]") == [f"{ranks}::test_ranks[a]"]
    assert find_tests(repository, "maths.py") == []


MUTANTS = read_mutants(ROOT)


def test_the_list_fits_the_package() -> None:
    """Texts and tests are there; that the tests fail is for the nightly job."""
    assert len(MUTANTS) >= 60
    texts = read_package(ROOT)
    wrong = {mutant.what: what_is_wrong(mutant, texts, ROOT) for mutant in MUTANTS}
    assert {what: why for what, why in wrong.items() if why} == {}
    assert max(Counter((mutant.old, mutant.new) for mutant in MUTANTS).values()) == 1


def test_a_mutant_that_does_not_fit_is_noticed() -> None:
    first = MUTANTS[0]
    gone = Mutant("gone", f"{first.old} #", first.new, first.tests, first.source)
    assert what_is_wrong(gone, read_package(ROOT), ROOT) == "its text occurs 0 times"
