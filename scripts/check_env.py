# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Check whether this interpreter has all requirements of pyproject.toml.

Usage: ``python scripts/check_env.py [EXTRA ...]``. It runs at every start, before the installation,
and decides whether one is needed. Therefore it uses the standard library only, and parses
requirement strings without the ``packaging`` library, which may not be installed yet.

Exit status: 0 everything is installed, 1 a requirement is missing, 2 the extra does not exist, 3
the installed torch is none that pyproject.toml allows.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(text: str, extras: list[str]) -> list[str]:
    """Return the requirement strings of pyproject.toml, including those of ``extras``.

    This does not use tomllib, which Python 3.10 lacks.
    """
    found: list[str] = []
    for key in ("dependencies", *extras):
        block = re.search(rf"^{re.escape(key)} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
        if block is None:
            print(f"error: pyproject.toml has no list {key!r}", file=sys.stderr)
            raise SystemExit(2)
        lines = (line.partition("#")[0] for line in block.group(1).splitlines())
        found += re.findall(r'"([^"]+)"', "\n".join(lines))
    return found


def satisfied(requirement: str) -> bool:
    """Return whether an installed distribution meets a requirement, e.g. ``torch>=2.11,<2.16``."""
    specifier, _, marker = requirement.partition(";")
    platforms = re.findall(r"sys_platform == '([^']+)'", marker)  # the only kind of marker there
    if platforms and sys.platform not in platforms:
        return True
    name = re.split(r"[<>=!\s]", specifier.strip())[0]
    found = installed(name)
    if found is None:
        return False
    have = release(found)
    tests = {">=": have.__ge__, "<": have.__lt__, "==": have.__eq__, "!=": have.__ne__}
    return all(
        tests[operator](release(version))
        for operator, version in re.findall(r"(>=|==|!=|<)\s*([\w.]+)", specifier)
    )


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, None without one."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return a version's numbers without trailing zeros, e.g. (2, 13) for ``2.13.0+cpu``."""
    numbers = [int(part) for part in re.split(r"[^\d.]", version)[0].split(".") if part]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(f"usage: check_env.py [EXTRA ...]\n\n{__doc__}")
        sys.exit(0)
    missing = [r for r in requirements(PYPROJECT.read_text(), sys.argv[1:]) if not satisfied(r)]
    torch = next((r for r in missing if re.match(r"torch\b", r)), None)
    if torch is not None and (found := installed("torch")) is not None:
        print(
            f"torch {found} is installed, and {torch} is required; it is never replaced: "
            f"run {sys.executable} -m pip install '{torch}', or remove the environment"
        )
        sys.exit(3)
    if missing:
        print("Not installed: " + ", ".join(missing))
    sys.exit(bool(missing))
