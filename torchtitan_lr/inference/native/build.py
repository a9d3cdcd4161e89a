# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Building and loading the library of the step; the result is kept for this processor."""

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torchtitan_lr.errors import ConfigError

_SOURCE = Path(__file__).with_name("step.cpp")

_HEADERS = ("common.h", "fetch.h", "products.h", "attention.h", "screen.h")

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC")


@cache
def load_library() -> ctypes.CDLL:
    """Return the library, built with ``$CXX`` (by default g++) unless it was built before.

    Raises:
        ConfigError: There is no such compiler, or it fails.
    """
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    sources = [_SOURCE, *map(_SOURCE.with_name, _HEADERS)]
    made = (*compiler, *_FLAGS, _processor(), *(source.read_text() for source in sources))
    key = hashlib.sha256("\0".join(made).encode()).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    library = Path(root) / "torchtitan_lr" / f"step-{key}.so"
    if not library.exists():
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as folder:
                _build(compiler, Path(folder), library)
        except OSError as error:
            want = f"a C++ compiler, or --compile instead ({error})"
            raise ConfigError("--native", shlex.join(compiler), want) from error
    return ctypes.CDLL(str(library))


def _build(compiler: list[str], folder: Path, library: Path) -> None:
    found, built = folder / "step.o", folder / "step.so"
    # In two steps: linked with -ffast-math, a library changes the rounding of the whole process.
    for command in (
        [*compiler, *_FLAGS, "-c", str(_SOURCE), "-o", str(found)],
        [*compiler, "-shared", "-fopenmp", str(found), "-o", str(built)],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            line = next(iter(done.stderr.strip().splitlines()), "no output")
            want = f"a compiler of C++17 with OpenMP, or --compile instead ({line})"
            raise ConfigError("--native", shlex.join(compiler), want)
    os.replace(built, library)


def _processor() -> str:
    """Return what ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    known = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), platform.processor(), *known])
