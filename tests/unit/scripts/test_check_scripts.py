# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/check_env.py`` and ``scripts/check_smoke.py``."""

import math
import subprocess
import sys

import pytest

from tests.scripts import ROOT, load_script


def test_environment_check_reads_pyproject():
    check_env = load_script("check_env")
    text = (ROOT / "pyproject.toml").read_text()
    plain = check_env.requirements(text, [])
    assert "torch>=2.11,<2.14" in plain and "torchtitan==0.2.2" in plain
    assert not any(requirement.startswith("pytest") for requirement in plain)
    assert set(check_env.requirements(text, ["dev"])) - set(plain) >= {"pytest", "ruff", "mypy"}
    assert all(map(check_env.satisfied, plain))


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("pytest", True),
        ("pytest>=1,<1000", True),
        ("pytest<1", False),
        ("pytest==1.2.3", False),
        ("no-such-distribution", False),
        ("no-such-distribution; sys_platform == 'linux'", sys.platform != "linux"),
        ("no-such-distribution; platform_machine == 'none' and python_version < '3.99'", True),
        ("no-such-distribution; python_version < '3.99'", False),
        ("no-such-distribution; python_version < '3.9'", True),
    ],
)
def test_environment_check(requirement, expected):
    assert load_script("check_env").satisfied(requirement) is expected


def test_release_numbers():
    release = load_script("check_env").release
    assert release("2.13.0+cpu") == (2, 13)
    assert release("2.14.0rc1") == (2, 14)
    assert release("2.9") < release("2.11")


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["nowhere"]])
def test_nothing_to_judge_is_one_line(arguments):
    command = [sys.executable, "scripts/check_smoke.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == (1 if arguments == ["nowhere"] else 2)
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1


def test_smoke_judge(tmp_path):
    problems = load_script("check_smoke").problems
    (tmp_path / "x").write_text("")
    good = {"steps": 20, "train_loss": 7.0, "val_loss": 7.1}
    good |= {"checkpoint": str(tmp_path), "curve": str(tmp_path / "x")}
    assert problems(good) == []
    for key, value in (
        ("steps", 19),
        ("train_loss", float("nan")),
        ("train_loss", math.log(4096)),
        ("val_loss", None),
        ("val_loss", 9.0),
        ("checkpoint", None),
        ("curve", "/no/such"),
    ):
        assert len(problems(good | {key: value})) == 1, key
