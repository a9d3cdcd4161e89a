# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What light commands load, in a fresh interpreter: ``sys.modules`` tells, and no seconds."""

import json
import os
import subprocess
import sys

import pytest

from tests.commands import HEAVY, ROOT

LIGHT = f"""
import json, os, sys
HEAVY = {HEAVY!r}
found = {{}}

def note(what, status=0):
    found[what] = [status, sorted(name for name in HEAVY if name in sys.modules)]

import torchtitan_lr.errors
note("errors")
import torchtitan_lr.data.tokenize, torchtitan_lr.data.prepare
note("corpora")
from torchtitan_lr.launch import launcher as launch
note("path", launch.main(["--job.config_file=nope.toml"]))
os.environ["CONFIG_FILE"] = "nope.toml"
note("CONFIG_FILE", launch.main([]))
note("syntax", launch.main(["--job.config_file=" + sys.argv[1]]))
os.environ["NGPU"] = "none"
note("NGPU", launch.main([]))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """What an interpreter of its own prints last."""
    broken = tmp_path_factory.mktemp("toml") / "broken.toml"
    broken.write_text("[training]\nsteps = = 3\n")
    variables = {k: v for k, v in os.environ.items() if k not in ("CONFIG_FILE", "NGPU")}
    command = [sys.executable, "-c", LIGHT, str(broken)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("what", "status"),
    [
        *(("errors", 0), ("corpora", 0)),
        *((refusal, 2) for refusal in ("path", "CONFIG_FILE", "syntax", "NGPU")),
    ],
)
def test_answers_without_torch(light, what, status):
    assert light[what] == [status, []]
