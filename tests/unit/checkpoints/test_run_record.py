# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The record of a run that is resumed with other settings."""

import json

import pytest

from torchtitan_lr.checkpoints.run_record import (
    changes_losses,
    left_out,
    read_record,
    write_record,
)
from torchtitan_lr.checks.stored import check_record
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError


def config(folder, *arguments):
    base = ["--job.config_file=debug_cola", f"--job.dump_folder={folder}"]
    base.append("--training.global_batch_size=-1")
    return build_job_config([*base, *arguments])


def test_both_values_stay_in_the_record(tmp_path):
    assert write_record(config(tmp_path), 0) == {}
    assert "changes" not in read_record(config(tmp_path))
    # What changes no number is no change, and neither is a list for a tuple.
    same = config(tmp_path, "--training.gc_freq=9", "--metrics.log_freq=3")
    assert write_record(same, 5) == {}
    batch = {"training.global_batch_size": [8, 4]}
    assert write_record(config(tmp_path, "--training.local_batch_size=4"), 5) == batch
    # debug_cola on 4 ranks has 2 of 8 sequences; only the way to write it is another.
    write_record(config(tmp_path), 0, ranks=4)
    fewer = write_record(config(tmp_path, "--training.global_batch_size=16"), 5, ranks=2)
    assert fewer == {"ranks": [4, 2]} and not changes_losses(fewer)
    assert write_record(config(tmp_path, "--training.global_batch_size=32"), 5, ranks=2)
    # The same settings on fewer ranks are another batch; a record of an earlier version has -1.
    write_record(config(tmp_path), 0, ranks=4)
    fewer = write_record(config(tmp_path), 5, ranks=2)
    assert fewer == {"ranks": [4, 2], "training.global_batch_size": [16, 8]}
    assert changes_losses(fewer)
    earlier = json.loads((tmp_path / "job_config.json").read_text())
    del earlier["global_batch_size"], earlier["changes"], earlier["environment"]
    (tmp_path / "job_config.json").write_text(json.dumps(earlier))
    assert write_record(config(tmp_path), 5, ranks=4) == {}
    write_record(config(tmp_path), 0)
    first = {"optimizer.lr": [0.006, 0.001]}
    assert write_record(config(tmp_path, "--optimizer.lr=1e-3"), 10) == first
    second = {"training.steps": [150, 300], "lr_scheduler.decay_type": ["cosine", "linear"]}
    second["lr_scheduler.warmup_steps"] = [15, 30]  # a share of them
    later = ("--optimizer.lr=1e-3", "--training.steps=300", "--lr_scheduler.decay_type=linear")
    assert write_record(config(tmp_path, *later), 20) == second
    record = json.loads((tmp_path / "job_config.json").read_text())
    assert record["changes"] == [{"after_step": 10, **first}, {"after_step": 20, **second}]
    assert (record["optimizer"]["lr"], record["training"]["steps"]) == (0.001, 300)
    other = {"parallelism.pipeline_parallel_degree": [1, 2]}
    layout = "--parallelism.pipeline_parallel_degree=2"
    assert other.items() <= write_record(config(tmp_path, *later, layout), 20).items()
    # A return to an earlier step forgets what came after it; a new run has no past.
    assert write_record(config(tmp_path, *later, "--training.seq_len=64"), 15)
    steps = [entry["after_step"] for entry in read_record(config(tmp_path))["changes"]]
    assert steps == [10, 15]
    write_record(config(tmp_path), 0)
    assert "changes" not in read_record(config(tmp_path))


def test_a_start_that_resumes_nothing_leaves_a_run_alone(tmp_path):
    """A trial without checkpoints, or with others, would replace the run's record and metrics."""
    write_record(config(tmp_path, "--checkpoint.folder=kept"), 0)
    step = tmp_path / "kept/step-6"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    trials = ["--checkpoint.folder=kept", "--checkpoint.no_enable"], ["--checkpoint.folder=other"]
    for trial in trials:
        with pytest.raises(ConfigError) as error:
            check_record(config(tmp_path, *trial), 1)
        assert str(error.value).startswith(f"job.dump_folder: got '{tmp_path}', expected a folder ")
        assert str(error.value).endswith(f" as in --job.dump_folder={tmp_path}-2")
    check_record(config(tmp_path, "--checkpoint.folder=kept"), 1)
    (tmp_path / "job_config.json").unlink()
    with pytest.raises(ConfigError, match=r"^job\.dump_folder: "):
        check_record(config(tmp_path, *trials[0]), 1)
    step.rename(tmp_path / "kept/step-0")  # the start of a run, which has trained nothing
    check_record(config(tmp_path, *trials[0]), 1)


def test_a_rank_of_0_is_compared_by_the_checkpoint(tmp_path):
    write_record(config(tmp_path), 0)
    for key in ("rank", "rank_attention"):
        assert write_record(config(tmp_path, f"--low_rank.{key}=32"), 5) == {}
    ranks = {"low_rank.rank_attention": [32, 16]}
    assert write_record(config(tmp_path, "--low_rank.rank_attention=16"), 5) == ranks


def test_a_state_is_left_out_until_the_run_has_saved_without_it(tmp_path):
    def without(*names, step=-1):
        key = f"--checkpoint.exclude_from_loading={','.join(names)}"
        return config(tmp_path, key, f"--checkpoint.load_step={step}")

    write_record(config(tmp_path), 0)
    assert left_out(without("optimizer"), 4) == ["optimizer"]
    change = {"checkpoint.exclude_from_loading": [[], ["optimizer"]]}
    for _ in range(2):  # killed before it saved, and started again
        assert write_record(without("optimizer"), 4, excluded=["optimizer"]) == change
        assert left_out(without("optimizer"), 4) == ["optimizer"]
    assert read_record(config(tmp_path))["changes"] == [{"after_step": 4, **change}]
    assert left_out(without("optimizer"), 6) == []
    assert left_out(without("optimizer", "dataloader"), 6) == ["dataloader"]
    assert left_out(without("optimizer", step=6), 6) == left_out(without("optimizer"), -1)
    assert left_out(without("optimizer"), -1) == ["optimizer"]
    write_record(config(tmp_path), 6)  # a start without the key
    assert left_out(without("optimizer"), 8) == ["optimizer"]
    # From another run's checkpoint: this run's own are whole.
    write_record(without("lr_scheduler"), 0)
    assert left_out(without("lr_scheduler"), 2) == []


CUT = b'{"job": {'
ENTRY = {"after_step": 5, "optimizer.lr": [0.006, 0.001]}


@pytest.mark.parametrize(
    ("damage", "keeps"),
    [
        (lambda record: CUT, False),
        (lambda record: json.dumps(record).encode().replace(b"cosine", b"cosin\xe5"), False),
        (lambda record: b"5", False),
        (lambda record: b"[" * 100_000, False),
        (lambda record: json.dumps(record | {"changes": 5}).encode(), False),
        (lambda record: json.dumps(record | {"changes": [5, {}, ENTRY]}).encode(), True),
        (lambda record: json.dumps(record | {"optimizer": [5], "training": 5}).encode(), True),
    ],
)
def test_a_damaged_record_costs_itself_alone_and_is_kept(damage, keeps, tmp_path, caplog):
    write_record(config(tmp_path), 0)
    again = config(tmp_path, "--optimizer.lr=1e-3")
    write_record(again, 5)
    path = tmp_path / "job_config.json"
    damaged = damage(json.loads(path.read_text()))
    path.write_bytes(damaged)
    check_record(again, 1)
    assert "training.steps" not in write_record(again, 7)
    assert (tmp_path / "job_config.json.damaged").read_bytes() == damaged
    assert "job_config.json is damaged: it is kept as " in caplog.text
    record = json.loads(path.read_text())
    assert record["optimizer"]["lr"] == 1e-3
    assert (ENTRY in record.get("changes", [])) == keeps
