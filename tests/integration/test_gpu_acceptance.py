# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/check/gpu_acceptance.py``: a rehearsal of all its parts with tiny models on the CPU."""

import json
import os
import sys

from tests.integration import runs

ACCEPTANCE = [sys.executable, "scripts/check/gpu_acceptance.py", "--tiny", "--commit=abc"]


def test_a_rehearsal(tmp_path):
    before = os.times()
    done = runs.run([*ACCEPTANCE, f"--out={tmp_path}"])
    print(done.everything, before)
    report = json.loads((tmp_path / "gpu_acceptance.json").read_text())
    assert done.status == 0, done.everything
