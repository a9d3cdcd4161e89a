# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Twenty random kills of a run, every night; the usual suite kills in `test_killed_rank`."""

import sys

import pytest

from tests.integration import runs
from tests.support import kills as script

SEED = 3  # the first three victims are three different ones

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds ranks by /proc")


def start(arguments):
    return runs.Process([*runs.LAUNCH, *arguments], NGPU="2")


@pytest.mark.nightly
def test_a_killed_run_ends_like_one_left_alone(tmp_path):
    config = runs.write_config(tmp_path / "job")
    arguments = [f"--job.config_file={config}", *script.SMALL]
    kills = list(script.kill_and_compare(start, arguments, tmp_path, 20, SEED))
    assert len(kills) == 20 and len({kill.victim for kill in kills}) >= 3
    assert all(kill.seconds < script.ORPHAN_SECONDS for kill in kills)
