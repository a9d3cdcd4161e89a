# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""`scripts/check/bench_checkpoint.py` measures what the trainer's own checkpoints do."""

from pathlib import Path

import pytest

from scripts.bench import checkpoint_times
from tests.distributed.training import known_setup
from tests.support.parity_runs import TINY
from tests.support.rank_pool import RankPool


def measure(arguments: list[str]) -> dict[str, object]:
    with known_setup():
        return checkpoint_times.measure(arguments)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_it_measures_saves_and_a_load(mode: str, two_ranks: RankPool, tmp_path: Path) -> None:
    arguments = [
        *(*TINY, f"--job.dump_folder={tmp_path}", "--training.local_batch_size=4"),
        *("--checkpoint.enable", "--checkpoint.interval=1", f"--checkpoint.async_mode={mode}"),
        "--training.steps=5",
    ]
    found, again = two_ranks.run(measure, arguments)
    assert found == again  # the slowest rank's times and the sums of bytes
    saved = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert saved == ["step-3"]
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "checkpoint/step-3").iterdir()}
    assert found["checkpoint"] == sum(sizes.values())
    assert found["parts"] == [sizes["__0_0.distcp"], sizes["__1_0.distcp"]]
    assert 0 < found["pause"] <= found["on_disk"]
    assert (found["step_while_saving"] > 0) <= (mode == "async")
    if found["read"] is not None:  # verified, and then loaded: at least twice by system calls
        assert found["read"] > 1.9 * found["checkpoint"]
        assert found["from_device"] < 1.5 * found["checkpoint"]
