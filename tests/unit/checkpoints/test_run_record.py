# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The record of a run, and what is listed where it is resumed with other settings."""

import json

import pytest

from torchtitan_lr.checkpoints.record import Record
from torchtitan_lr.checkpoints.run_record import changed, changes_losses, run_record, write_record
from torchtitan_lr.checks.stored import check_other_run
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError


def config(folder, *arguments):
    base = ["--job.config_file=debug_cola", f"--job.dump_folder={folder}"]
    base.append("--training.global_batch_size=-1")
    return build_job_config([*base, *arguments])


def record(*arguments, ranks=1):
    return json.loads(json.dumps(run_record(config("run", *arguments), ranks)))


CHANGES = [
    # What changes no number is no change, and neither is a list for a tuple.
    (["--training.gc_freq=9", "--metrics.log_freq=3", "--optimizer.tsr_refresh=dense"], {}),
    (["--training.local_batch_size=4"], {"training.global_batch_size": [8, 4]}),
    (["--training.local_batch_size=4", "--training.global_batch_size=8"], {}),
    # Another model is refused, and so are other data unless their position is left out.
    (["--low_rank.rank=16", "--training.seq_len=64"], {}),
    (["--optimizer.lr=1e-3"], {"optimizer.lr": [0.006, 0.001]}),
    (
        ["--training.steps=300", "--lr_scheduler.decay_type=linear"],
        {
            "training.steps": [150, 300],
            "lr_scheduler.decay_type": ["cosine", "linear"],
            "lr_scheduler.warmup_steps": [15, 30],  # a share of them
        },
    ),
]


@pytest.mark.parametrize(("arguments", "changes"), CHANGES)
def test_what_a_resumed_run_lists(arguments, changes):
    assert changed(record(), record(*arguments)) == changes


def test_a_layout_is_listed_and_changes_no_loss():
    batch = "--training.global_batch_size=16"
    fewer = changed(record(ranks=4), record(batch, ranks=2))
    assert fewer == {"environment.ranks": [4, 2]} and not changes_losses(fewer)
    # The same settings on fewer ranks are another batch.
    assert changes_losses(changed(record(ranks=4), record(ranks=2)))
    stages = changed(record(), record("--parallelism.pipeline_parallel_degree=2", batch))
    assert stages["parallelism.pipeline_parallel_degree"] == [1, 2]


def test_what_was_left_out_is_listed():
    other = record("--training.seq_len=64")
    assert changed(record(), other, ["dataloader"]) == {
        "training.seq_len": [128, 64],
        "checkpoint.exclude_from_loading": [[], ["dataloader"]],
    }


def test_a_start_that_resumes_nothing_leaves_a_run_alone(tmp_path):
    """A trial without checkpoints, or with others, would replace the run's record and metrics."""
    kept = config(tmp_path, "--checkpoint.folder=kept")
    write_record(kept, run_record(kept, 1))
    step = tmp_path / "kept/step-6"
    step.mkdir(parents=True)
    Record().write(step)
    trials = ["--checkpoint.folder=kept", "--checkpoint.no_enable"], ["--checkpoint.folder=other"]
    for trial in trials:
        with pytest.raises(ConfigError) as error:
            check_other_run(config(tmp_path, *trial), 1, "cpu")
        assert str(error.value).startswith(f"job.dump_folder: got '{tmp_path}', expected a folder ")
        assert str(error.value).endswith(f" as in --job.dump_folder={tmp_path}-2")
    check_other_run(kept, 1, "cpu")
    (tmp_path / "job_config.json").write_text("{")  # what a run writes, the next one replaces
    with pytest.raises(ConfigError, match=r"^job\.dump_folder: "):
        check_other_run(config(tmp_path, *trials[0]), 1, "cpu")
    step.rename(tmp_path / "kept/step-0")  # the start of a run, which has trained nothing
    check_other_run(config(tmp_path, *trials[0]), 1, "cpu")


@pytest.mark.parametrize("contents", [".metadata", "model.safetensors.index.json"])
def test_checkpoints_without_records_are_left_alone(contents, tmp_path):
    """No start resumes them; one from step 0 would rename them and empty the metrics."""
    here = config(tmp_path)
    steps = [tmp_path / here.checkpoint.folder / name for name in ("step-2", "step-4")]
    for step in steps:
        step.mkdir(parents=True)
    check_other_run(here, 1, "cpu")  # what a killed save left
    (steps[0] / contents).touch()
    with pytest.raises(ConfigError) as error:
        check_other_run(here, 1, "cpu")
    why = f"{steps[0].parent} have no step.json, so no start resumes them; for a new run "
    assert f"{why}choose another folder, as in --job.dump_folder={tmp_path}-2" in str(error.value)
    (steps[0] / "step.begun").touch()
    check_other_run(here, 1, "cpu")  # a save that was killed between this file and its record
    (steps[0] / "step.begun").unlink()
    Record().write(steps[1])
    check_other_run(here, 1, "cpu")
