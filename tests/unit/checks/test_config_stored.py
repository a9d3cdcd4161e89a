# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a run begins with is judged before any rank starts."""

import json

import torchtitan_lr.training.register  # noqa: F401
from tests.support.config_checks import MAIN, check, refusal
from torchtitan_lr.checkpoints.record import Record
from torchtitan_lr.checks import values
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.models import configured
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.training.fingerprint import identity_of, model_fingerprint


def test_load_step_lists_what_there_is(tmp_path):
    folder = tmp_path / "checkpoint"
    whole = {"train_state": {}, "optimizer": {}, "lr_scheduler": {}, "dataloader": {}}
    for step in (10, 9, 100, 110):
        (folder / f"step-{step}").mkdir(parents=True)
        if step != 110:  # it has a folder, but was never finished
            (folder / f"step-{step}" / ".metadata").touch()
            Record({"model": {}} | (whole if step < 100 else {})).write(folder / f"step-{step}")
    (folder / "step-100/.metadata").unlink()  # in Hugging Face's format
    text = refusal("--checkpoint.load_step=110", f"--job.dump_folder={tmp_path}")
    assert text == "checkpoint.load_step: got 110, expected one of 9, 10, 100"
    check("--checkpoint.load_step=10", f"--job.dump_folder={tmp_path}")
    text = refusal("--checkpoint.load_step=100", f"--job.dump_folder={tmp_path}")
    assert f"{folder}/step-100', expected one with train_state: it holds model; " in text
    for path in (folder, folder / "step-110"):
        assert refusal(f"--checkpoint.initial_load_path={path}").endswith("9, 10, 100")
    check(f"--checkpoint.initial_load_path={folder}/step-9")


def test_a_checkpoint_of_another_family_is_refused_before_any_rank(tmp_path):
    model = model_fingerprint(FLAVORS["cola"]["debug"])
    step = tmp_path / "checkpoint/step-5"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    Record({"model": model, "train_state": {}, "optimizer": {}, "dataloader": {}}).write(step)
    here, svd = [f"--job.dump_folder={tmp_path}"], "--model.name=llama_svd"
    check(*here, "--training.seq_len=256")
    elsewhere = [f"--job.dump_folder={tmp_path}/new", f"--checkpoint.initial_load_path={step}"]
    line = f"model.name: got 'llama_svd', expected 'llama_cola' as in {step}, which holds another"
    for where in (here, elsewhere):
        assert refusal(*where, svd).startswith(line)
    for content in ("{", "[]", '{"format": 2}', json.dumps({"format": 1, "checksum": 1})):
        (step / "step.json").write_text(content)
        for where in (here, elsewhere):
            told = refusal(*where, svd)
            assert told.startswith(f"checkpoint: got '{step}', expected a whole one (step.json")


def saved_step(folder, options):
    """A step of a run of the main job with these options on four ranks, and its states."""
    step = folder / "checkpoint/step-5"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    config = build_job_config([f"--job.config_file={MAIN}", *options])
    saved = identity_of(config, 4, configured.configured_args(config), "")
    saved |= {"model": {}, "dataloader": {}}
    Record(saved).write(step)
    return step, saved


def test_residuals_belong_to_their_layout(tmp_path):
    options = [f"--job.dump_folder={tmp_path}", "--grad_compression.codec=sparse"]
    options += ["--parallelism.tensor_parallel_degree=1", "--training.local_batch_size=4"]
    step, saved = saved_step(tmp_path, options)
    check(*options)
    for option, line in {
        "--grad_compression.min_size=5000": "grad_compression.min_size: got 5000, expected 16384",
        "--grad_compression.layers=non_attention": "grad_compression.layers: got 'non_att",
        "--parallelism.data_parallel_replicate_degree=2": "parallelism.data_parallel_replicate_d",
    }.items():
        way = ["--checkpoint.load_step=5", "--checkpoint.exclude_from_loading=grad_compression"]
        told = refusal(*options, option)
        assert told.startswith(line) and all(part in told for part in way)
        check(*options, option, *way)
    check(*options, "--grad_compression.codec=none")
    Record({key: value for key, value in saved.items() if key != "grad_compression"}).write(step)
    assert "expected one with grad_compression: it holds " in refusal(*options)
    # Muon splits A (r, d_in) along d_in: of equal shapes and tensors, but in another order.
    saved_step(tmp_path / "muon", [*options, "--optimizer.name=Muon"])
    adamw = [*options, f"--job.dump_folder={tmp_path}/muon", "--checkpoint.load_step=5"]
    told = refusal(*adamw, "--checkpoint.exclude_from_loading=optimizer")
    assert told.startswith("optimizer.name: got 'AdamW', expected 'Muon' as in ")
    way = "--checkpoint.exclude_from_loading=optimizer,grad_compression --checkpoint.load_step=5"
    assert f"{way} goes on without its grad_compression; " in told


def test_a_checkpoint_of_other_outer_steps_is_refused(tmp_path):
    options = [f"--job.dump_folder={tmp_path}", "--outer.every=9", "--outer.bits=4"]
    saved_step(tmp_path, options)
    check(*options, "--outer.lr=0.5", "--parallelism.data_parallel_replicate_degree=2")
    way = "--checkpoint.load_step=5"
    for option, line, state in (
        ("--outer.every=0", "outer.every: got 0, expected 9 as in ", "optimizer"),
        ("--outer.bits=8", "outer.bits: got 8, expected 4 as in ", "outer"),
        ("--outer.overlap", "outer.overlap: got True, expected False as in ", "outer"),
    ):
        told = refusal(*options, option)
        assert told.startswith(line) and f"{state} {way}" in told
        check(*options, option, way, f"--checkpoint.exclude_from_loading={state}")


def test_ranks_that_do_not_fit_in_their_machine_are_refused(tmp_path, monkeypatch):
    # 512 sequences of 128 tokens: about 3 GiB for the main job's model.
    large = ["--training.local_batch_size=512", "--parallelism.tensor_parallel_degree=1"]
    large += ["--compile.no_enable", f"--job.dump_folder={tmp_path}"]
    check(*large, world=1)
    monkeypatch.setattr(values, "machine_memory", lambda: 2**30)
    told = refusal(*large, world=1)
    assert told.startswith("training.local_batch_size: got 512, expected less")
    check(*large, "--training.no_check_memory", world=1)
    check(*large, world=1, device="cuda")
    small = [*large, "--training.local_batch_size=48"]
    check(*small, world=1)
    assert "4 ranks need" in refusal(*small, world=4)
