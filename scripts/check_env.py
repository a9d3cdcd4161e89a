# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Says whether this interpreter has what pyproject.toml asks for: exit status 0 or 1.

Usage: ``python scripts/check_env.py [EXTRA ...]``. Standard library only, no imports of the
packages themselves: it runs at every start, before anything is installed.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(text: str, extras: list[str]) -> list[str]:
    """Returns the requirement strings of pyproject.toml, those of ``extras`` included.

    No tomllib: Python 3.10 has none, and nothing is installed yet.
    """
    found: list[str] = []
    for key in ("dependencies", *extras):
        block = re.search(rf"^{re.escape(key)} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
        if block is None:
            raise SystemExit(f"check_env: pyproject.toml has no list {key!r}")
        lines = (line.partition("#")[0] for line in block.group(1).splitlines())
        found += re.findall(r'"([^"]+)"', "\n".join(lines))
    return found


def satisfied(requirement: str) -> bool:
    """Whether an installed distribution meets one requirement such as ``torch>=2.11,<2.14``."""
    specifier, _, marker = requirement.partition(";")
    if "sys_platform == 'linux'" in marker and sys.platform != "linux":
        return True
    name = re.split(r"[<>=\s]", specifier.strip())[0]
    try:
        have = release(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False
    tests = {">=": have.__ge__, "<": have.__lt__, "==": have.__eq__}
    return all(
        tests[operator](release(version))
        for operator, version in re.findall(r"(>=|==|<)\s*([\w.]+)", specifier)
    )


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, ``2.13.0+cpu`` as (2, 13, 0), trailing zeros dropped."""
    numbers = [int(part) for part in re.split(r"[^\d.]", version)[0].split(".") if part]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(f"usage: check_env.py [EXTRA ...]\n\n{__doc__}")
        sys.exit(0)
    missing = [r for r in requirements(PYPROJECT.read_text(), sys.argv[1:]) if not satisfied(r)]
    if missing:
        print("not installed: " + ", ".join(missing))
    sys.exit(bool(missing))
