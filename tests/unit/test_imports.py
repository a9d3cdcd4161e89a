# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What importing loads, in fresh interpreters: no seconds are measured, ``sys.modules`` tells."""

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

REGISTERED = f"""
import importlib, json, sys
found = {{}}
from torchtitan_lr.config.build import build_job_config
import torchtitan_lr.training.trainer
from torchtitan.protocols.train_spec import _extra_train_specs as table
found["train"] = [name for name in {HEAVY!r} if name in sys.modules]
found["none"] = sorted(table)

new = build_job_config([]).experimental.custom_import
importlib.import_module(new)
found["new"] = sorted(table)
print(json.dumps(found))
"""

OURS = ["llama_cola", "llama_full", "llama_lax", "llama_svd"]


def python(code, *arguments):
    """What an interpreter of its own prints last, as JSON."""
    variables = {k: v for k, v in os.environ.items() if k not in ("CONFIG_FILE", "NGPU")}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    broken = tmp_path_factory.mktemp("toml") / "broken.toml"
    broken.write_text("[training]\nsteps = = 3\n")
    return python(LIGHT, str(broken))


@pytest.fixture(scope="module")
def registered():
    return python(REGISTERED)


@pytest.mark.parametrize(
    ("what", "status"),
    [
        *(("errors", 0), ("corpora", 0)),
        *((refusal, 2) for refusal in ("path", "CONFIG_FILE", "syntax", "NGPU")),
    ],
)
def test_answers_without_torch(light, what, status):
    assert light[what] == [status, []]


def test_training_loads_only_what_torchtitan_does(registered):
    """``datasets`` and what it needs are torchtitan's: its table of models imports them."""
    loaded = registered["train"]
    assert {"torch", "torchtitan", "datasets"} <= set(loaded)  # the check can see them
    assert not {"transformers", "matplotlib", "wandb", "tiktoken", "safetensors"} & set(loaded)


def test_specs_are_registered_by_the_module_that_custom_import_names(registered):
    assert registered["none"] == []
    assert registered["new"] == OURS
