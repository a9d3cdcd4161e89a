# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""`experiments.run_on_ranks`: a module that runs itself on all ranks and takes rank 0's answer."""

import json
import os
import sys

from tests.integration import runs

MODULE = """
import json, os, sys
from torchtitan_lr.scaling.experiments import RunFailedError, report_from_rank, run_on_ranks

def measure(arguments):
    if "--fail" in arguments and os.environ["RANK"] == "1":
        sys.exit("no such rank")
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
    return found | {"folder": any(a.startswith("--job.dump_folder=") for a in arguments)}

report_from_rank(measure, sys.argv[1:])
assert "RANK" not in os.environ, "answered, but went on"
try:
    print(json.dumps(run_on_ranks("ask", sys.argv[1:], ranks=2)))
except RunFailedError as error:
    print(json.dumps({"failed": str(error)}))
"""


def ask(tmp_path, *arguments):
    (tmp_path / "ask.py").write_text(MODULE)
    path = f"{tmp_path}{os.pathsep}{runs.ROOT}"
    done = runs.run([sys.executable, "-m", "ask", *arguments], PYTHONPATH=path)
    assert done.status == 0, done.everything
    return json.loads(done.out)


def test_rank_0_answers_for_as_many_as_asked(tmp_path):
    assert ask(tmp_path) == {"RANK": "0", "WORLD_SIZE": "2", "folder": True}


def test_a_rank_that_fails_is_told(tmp_path):
    assert "no such rank" in ask(tmp_path, "--fail")["failed"]
