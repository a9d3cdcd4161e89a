# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Build the sdist and the wheel, install the wheel, and train from it outside the repository.

    python -m scripts.check_wheel                 a clean environment: pip installs everything
    python -m scripts.check_wheel --torch 2.11    with this version of torch
    python -m scripts.check_wheel --light         on top of this interpreter's packages

The wheel is built from the unpacked sdist and from the sources; both must be equal. The run is the
main job in a short form, started as `torchtitan-lr train debug_cola` in a folder of its own; its
configuration and its package must be the installed ones. --light installs the wheel alone, trains
two steps on one rank and needs no network; the build needs setuptools in this interpreter.

Exit status: 0 passed, 1 failed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.errors import ConfigError, RunFailedError

ROOT = Path(__file__).resolve().parents[1]

SOURCES = ("torchtitan_lr", "train_configs", "docs")
FILES = (
    *("LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff"),
    *("MANIFEST.in", "pyproject.toml"),
)

MAIN_JOB = [
    *("--training.steps=20", "--lr_scheduler.warmup_steps=2", "--metrics.log_freq=5"),
    *("--validation.steps=2", "--checkpoint.interval=10"),
]
"""The main job's short form, as in scripts/smoke_4gpu.sh."""

TWO_STEPS = [
    *("--training.steps=2", "--lr_scheduler.warmup_steps=1", "--training.local_batch_size=1"),
    *("--training.seq_len=32", "--validation.no_enable", "--checkpoint.no_enable"),
    *("--metrics.log_freq=1", "--metrics.no_enable_tensorboard"),
]

HOOKS = """
import sys
from setuptools import build_meta
folder, *hooks = sys.argv[1:]  # setuptools changes sys.argv
for hook in hooks:
    getattr(build_meta, hook)(folder)
"""

WHERE = """
import importlib.metadata, json, sys
import torchtitan_lr
print(json.dumps([torchtitan_lr.__file__, sys.path, importlib.metadata.version("torch")]))
"""

# What would lead a run to files of a checkout, or change its settings.
_VARIABLES = r"(PYTHON.*|NGPU|NNODES|CONFIG_FILE|LOG_RANK|COMM_MODE|TRAIN_FILE|RDZV_.*)$"


def build(work: Path) -> tuple[Path, Path, Path]:
    """Build the sdist, a wheel from the sources, and a wheel from the unpacked sdist.

    ``work`` is a new folder for copies and results; the repository is not written to.
    """
    copy = work / "copy"
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    folders = [work / "dist", work / "again"]
    for folder in folders:
        folder.mkdir()
    call([sys.executable, "-c", HOOKS, folders[0], "build_sdist", "build_wheel"], copy)
    (sdist,) = folders[0].glob("*.tar.gz")
    shutil.unpack_archive(sdist, work / "unpacked")  # extractall has no filter in 3.11.2
    (unpacked,) = (work / "unpacked").iterdir()
    call([sys.executable, "-c", HOOKS, folders[1], "build_wheel"], unpacked)
    (wheel,), (again,) = (list(folder.glob("*.whl")) for folder in folders)
    return sdist, wheel, again


def contents(wheel: Path) -> dict[str, int]:
    """Return the checksum of every file of a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {item.filename: item.CRC for item in archive.infolist()}


def install(wheel: Path, target: Path, torch: str = "", light: bool = False) -> Path:
    """Install a wheel in a new environment in a folder; return its folder of programs.

    ``torch`` is a version such as ``2.11``, empty for the newest. ``light`` installs nothing else:
    the environment sees the packages of this interpreter.
    """
    venv.create(target, with_pip=not light, symlinks=True)
    programs = target / "bin"
    python = programs / "python"
    if light:
        options = ["--no-deps", "--no-index", "--no-compile", "--quiet"]
        call([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], target)
        (packages,) = target.glob("lib/python*/site-packages")
        # A line of a .pth file adds a folder, but does not execute the .pth files there: an
        # editable installation of this repository stays invisible.
        seen = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        (packages / "below.pth").write_text("\n".join(seen) + "\n")
    else:
        versions = [f"torch=={torch}.*"] if torch else []
        call([python, "-m", "pip", "install", "--quiet", wheel, *versions], target)
    return programs


def train(programs: Path, folder: Path, arguments: Sequence[str], ranks: str = "") -> str:
    """Run ``torchtitan-lr train`` of an environment in a folder; return what it printed."""
    return call([programs / "torchtitan-lr", "train", *arguments], folder, NGPU=ranks)


def check_origin(programs: Path, folder: Path, config: str) -> str:
    """Check that an environment's run used the environment's files; return torch's version."""
    package, path, torch = json.loads(call([programs / "python", "-c", WHERE], folder))
    record = json.loads((folder / f"outputs/{config}/job_config.json").read_text())
    environment = programs.parent.resolve()
    for what in (package, record["job"]["config_file"]):
        if environment not in Path(what).resolve().parents:
            raise RunFailedError(f"error: {what} is not in {environment}")
    if str(ROOT) in path:
        raise RunFailedError(f"error: the repository is on the search path {path}")
    return str(torch)


def call(command: Sequence[object], cwd: Path, **variables: str) -> str:
    """Run a program in an environment without this one's settings; return its stdout."""
    clean = {k: v for k, v in os.environ.items() if not re.match(_VARIABLES, k)}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=clean | variables, capture_output=True, text=True)
    if done.returncode:
        raise RunFailedError(f"error: {' '.join(words)}: {done.stderr or done.stdout}")
    return done.stdout


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Build, install, train, and print what happened; return the exit status."""
    options = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="torchtitan_lr_wheel.") as name:
        work = Path(name)
        begin = time.monotonic()
        sdist, wheel, again = build(work)
        if contents(wheel) != contents(again):
            differ = sorted(set(contents(wheel).items()) ^ set(contents(again).items()))
            raise RunFailedError(f"error: the sdist builds another wheel: {differ[:3]}")
        files = len(contents(wheel))
        print(f"{sdist.name}, {wheel.name}: {files} files, the same wheel from both", flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            for file in (sdist, wheel):
                shutil.copy(file, options.out)
        programs = install(wheel, work / "environment", options.torch, options.light)
        seconds = time.monotonic() - begin
        print(f"installed in {seconds:.0f} s, the build included", flush=True)
        folder = work / "elsewhere"
        folder.mkdir()
        form, ranks = (TWO_STEPS, "1") if options.light else (MAIN_JOB, "")
        print(train(programs, folder, ["debug_cola", *form], ranks).strip())
        torch = check_origin(programs, folder, "debug_cola")
    print(f"passed: trained from the wheel, with torch {torch}")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder to copy the sdist and the wheel to")
    parser.add_argument("--torch", default="", help="version of torch, such as 2.11")
    parser.add_argument("--light", action="store_true", help="the wheel alone, two steps")
    options = parser.parse_args(argv)
    if not re.fullmatch(r"(\d+(\.\d+)*)?", options.torch):
        raise ConfigError("--torch", options.torch, "a version such as 2.11")
    if options.torch and options.light:
        raise ConfigError("--torch", options.torch, "no version beside --light")
    return options


if __name__ == "__main__":
    sys.exit(main())
