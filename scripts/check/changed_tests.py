# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Print the unit tests of changed files, one per line, for ``run_tests.sh --quick``.

Usage: ``python scripts/check/changed_tests.py [REVISION]``. A file is changed if it differs from
the revision or is not committed. The default revision is the branch point from main or, on main,
the previous commit. A module's tests are the test files named after it and those that import it.
Standard library only.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNITS = "tests/unit"
FALLBACK = f"{UNITS}/test_docs.py"
"""This test, which reads the documents, always runs, so that the list is never empty."""


def git(*arguments: str) -> list[str]:
    """Return the output lines of a git command; none if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def base_revision() -> str:
    """Return the branch point from main or, on main, the previous commit."""
    head = git("rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        base = git("merge-base", "HEAD", main)
        if base and base != head:
            return base[0]
    return "HEAD~1"


def changed_files(revision: str) -> list[str]:
    """Return paths that differ from a revision, uncommitted and new ones included."""
    return [
        *git("diff", "--name-only", revision),
        *git("ls-files", "--others", "--exclude-standard"),
    ]


def imported_modules(path: Path) -> set[str]:
    """Return the dotted names that a file imports anywhere, ``from a import b`` as both."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def tests_of(changed: list[str], root: Path = ROOT) -> list[str]:
    """Return the unit test files of changed files, in order.

    Args:
        changed: Paths from the repository's root.
        root: The repository.
    """
    sources = [Path(path) for path in changed if path.endswith(".py")]
    modules = {".".join(path.with_suffix("").parts) for path in sources}
    stems = {f"test_{path.stem}.py" for path in sources} | {path.name for path in sources}
    found = {FALLBACK}
    for test in sorted((root / UNITS).rglob("test_*.py")):
        if test.name in stems or modules & imported_modules(test):
            found.add(test.relative_to(root).as_posix())
    return sorted(found)


def main(arguments: list[str]) -> int:
    """Print the files or the usage; return the exit status."""
    if arguments in (["-h"], ["--help"]):
        print(f"usage: changed_tests.py [REVISION]\n\n{__doc__}")
        return 0
    if len(arguments) > 1 or (arguments[:1] and arguments[0].startswith("-")):
        print(f"error: got {' '.join(arguments)!r}, expected at most a revision", file=sys.stderr)
        return 2
    print("\n".join(tests_of(changed_files(arguments[0] if arguments else base_revision()))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
