# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Apply each mutant to a copy of the repository, and run the tests that must fail.

    python -m tests.mutants                 # all: half an hour on two cores
    python -m tests.mutants --only TSR      # those whose description contains a text

A mutant is one wrong line: its old text, which the package has once, the new text, and the tests of
which one must fail. Exit status: 0 all were killed, 1 some survived, 2 a mutant does not apply.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tomli

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("torchtitan_lr", "tests", "scripts", "train_configs", "docs")
LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    what: str
    old: str
    new: str
    tests: Sequence[str]


class BrokenMutant(Exception):
    """A mutant whose text or test does not exist."""


def read_mutants() -> list[Mutant]:
    """Return the mutants of all lists in this folder."""
    lists = [tomli.loads(path.read_text()) for path in sorted(Path(__file__).parent.glob("*.toml"))]
    return [Mutant(**item) for found in lists for item in found["mutant"]]


def find_file(mutant: Mutant, root: Path = ROOT) -> Path:
    """Return the file of a mutant, relative to the repository."""
    files = [
        path.relative_to(root)
        for path in root.glob("torchtitan_lr/**/*.py")
        for _ in range(path.read_text().count(mutant.old))
    ]
    if len(files) != 1:
        raise BrokenMutant(f"{mutant.what}: its text occurs {len(files)} times")
    return files[0]


def find_tests(mutant: Mutant, root: Path = ROOT) -> list[str]:
    """Return pytest's ids of a mutant's tests."""
    found = []
    for name in mutant.tests:
        file, _, function = name.partition("::")
        function, bracket, case = function.partition("[")
        has = re.compile(rf"^def {function}\(", re.MULTILINE)
        paths = [p for p in root.glob(f"tests/**/{file}") if has.search(p.read_text())]
        if not function:
            paths = list(root.glob(f"tests/**/{file}"))
        if not paths:
            raise BrokenMutant(f"{mutant.what}: there is no test {name}")
        test = f"::{function}{bracket}{case}".removesuffix("::")
        found += [f"{path.relative_to(root)}{test}" for path in paths]
    return found


def run(mutant: Mutant, root: Path = ROOT) -> bool:
    """Apply a mutant to a copy and run its tests; return whether one fails."""
    file, tests = find_file(mutant, root), find_tests(mutant, root)
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for folder in filter(lambda folder: (root / folder).is_dir(), COPIED):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / folder, copy / folder, symlinks=True, ignore=ignored)
        for config in root.glob("*.toml"):
            shutil.copy(config, copy)
        text = (copy / file).read_text()
        (copy / file).write_text(text.replace(mutant.old, mutant.new))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=copy,
                env=os.environ | {"PYTHONPATH": name, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                timeout=LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return True  # a hang is noticed too
    return done.returncode == 1


def main() -> int:
    """Run the mutants; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="text of the descriptions to run")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    options = parser.parse_args()
    mutants = [mutant for mutant in read_mutants() if options.only in mutant.what]
    try:
        for mutant in mutants:
            find_file(mutant), find_tests(mutant)
    except BrokenMutant as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    survived = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, killed in zip(mutants, pool.map(run, mutants), strict=True):
            survived += not killed
            print("killed  " if killed else "SURVIVED", mutant.what, flush=True)
    print(f"{len(mutants) - survived} killed, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
