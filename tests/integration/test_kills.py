# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Twenty random kills of a run, every night; the usual suite kills in `test_killed_rank`."""

import json
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


def write(folder, records):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


@pytest.mark.parametrize("fault", ["", "missing", "doubled", "other"])
def test_a_difference_is_noticed(tmp_path, fault):
    records = [{"step": step, "grad_norm": 1 / step} for step in (1, 2, 3)]
    write(tmp_path / "alone", records)
    disturbed = {
        "": records,
        "missing": records[:1] + records[2:],
        "doubled": records[:2] + records[1:],
        "other": [*records[:2], records[2] | {"grad_norm": 0.33}],
    }
    write(tmp_path / "killed", disturbed[fault])
    if not fault:
        script.compare(tmp_path / "killed", tmp_path / "alone", 3)
        return
    with pytest.raises(script.Broken, match="step"):
        script.compare(tmp_path / "killed", tmp_path / "alone", 3)
