# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``setup_env.sh`` by the real pip and venv, on packages in a folder that hold only their names."""

import os
import shutil
import subprocess
import sys
import time
import zipfile

import pytest

from tests.integration.runs import ROOT

PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "small"
dependencies = [
    "torch>=2.11,<2.16",
    "needed>=1,!=1.5",
]

[project.optional-dependencies]
dev = ["more>=1"]
"""

# Builds without setuptools, which a new environment of Python 3.12 does not have.
BACKEND = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{folder}/small-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small-1.dist-info/METADATA", METADATA)
        wheel.writestr("small-1.dist-info/WHEEL", WHEEL)
        wheel.writestr("small-1.dist-info/RECORD", "")
    return "small-1-py3-none-any.whl"
"""

WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"

REQUIRED = """Requires-Dist: torch>=2.11,<2.16
Requires-Dist: needed>=1,!=1.5
Provides-Extra: dev
Requires-Dist: more>=1; extra == "dev"
"""

SETUP = '. scripts/setup_env.sh; setup_env {extra}; echo "uses $RUN_PYTHON"'


def write_wheel(folder, name, version):
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        info = f"{name}-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", METADATA.format(name, version))
        wheel.writestr(f"{info}/WHEEL", WHEEL)
        wheel.writestr(f"{info}/RECORD", "")


class Project:
    def __init__(self, folder):
        self.folder = folder
        (folder / "scripts").mkdir()
        for name in ("setup_env.sh", "check_env.py"):
            shutil.copy(ROOT / "scripts" / name, folder / "scripts")
        (folder / "pyproject.toml").write_text(PYPROJECT)
        own = f"METADATA = {METADATA.format('small', 1) + REQUIRED!r}\nWHEEL = {WHEEL!r}\n"
        (folder / "backend.py").write_text(own + BACKEND)
        (folder / "wheels").mkdir()
        for version in ("2.10.0", "2.13.0", "2.15.0", "2.16.0"):
            write_wheel(folder / "wheels", "torch", version)
        for name in ("needed", "more"):
            write_wheel(folder / "wheels", name, "1.0")

    def environment(self):
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.folder / "wheels")}
        offline |= {"PIP_CONFIG_FILE": os.devnull}
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "VIRTUAL_ENV")}
        return kept | offline | {"PYTHON": sys.executable, "LC_ALL": "C"}

    def start(self, extra=""):
        command = ["bash", "-euo", "pipefail", "-c", SETUP.format(extra=extra)]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def setup(self, extra=""):
        process = self.start(extra)
        out, _ = process.communicate(timeout=300)
        return process.returncode, out

    def pip(self, *words):
        pip = [self.folder / ".venv/bin/python", "-m", "pip", "-q", *words]
        subprocess.run(pip, env=self.environment(), check=True)

    def version(self, name):
        code = f"from importlib.metadata import version; print(version({name!r}))"
        python = [self.folder / ".venv/bin/python", "-c", code]
        return subprocess.run(python, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


gpu = pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="a GPU takes the newest")


@gpu
@pytest.mark.nightly  # a run of the suite begins with this script
def test_an_environment_is_made_once(project):
    """By one process, while others wait; and a torch that is there stays."""
    lock = project.folder / ".venv.lock"
    lock.mkdir()
    beat = lock / "beat"
    beat.write_text("another-machine 1 0\n")
    process = project.start()
    for number in range(1, 6):  # process 1 lives here too, and would not count as dead
        time.sleep(1)
        beat.write_text(f"another-machine 1 {number}\n")
        assert process.poll() is None and not (project.folder / ".venv").exists()
    shutil.rmtree(lock)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert "Waiting: another process installs into .venv (another-machine 1)" in out
    assert "Setting up .venv with Python 3" in out
    assert "No NVIDIA GPU here: torch 2.13.0 for the CPU" in out
    assert project.version("torch") == "2.13.0"
    assert not (project.folder / ".venv.lock").exists()
    assert project.setup() == (0, "uses .venv/bin/python\n")
    # What an extra misses is named, and torch stays although there is a newer one.
    status, out = project.setup("dev")
    assert status == 0, out
    assert "Installing into .venv. Not installed: more>=1" in out
    assert project.version("more") == "1.0" and project.version("torch") == "2.13.0"
    # So does one of the user's own, although a new environment has another.
    project.pip("install", "torch==2.15.0")
    project.pip("uninstall", "-y", "needed")
    status, out = project.setup()
    assert status == 0, out
    assert "Not installed: needed>=1,!=1.5" in out
    assert project.version("needed") == "1.0" and project.version("torch") == "2.15.0"
    project.pip("install", "torch==2.16.0")
    status, out = project.setup()
    assert status == 1
    assert "error: torch 2.16.0 is installed, and torch>=2.11,<2.16 is required" in out
    assert project.version("torch") == "2.16.0"
