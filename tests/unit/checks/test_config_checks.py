# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Values that cannot work are refused in one line, and no others are."""

import json

import pytest

from tests.support.config_checks import MAIN, check, refusal
from torchtitan_lr.checkpoints.record import Record
from torchtitan_lr.checks.values import check_vocabulary
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.models import configured
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.training import fingerprint
from torchtitan_lr.training.fingerprint import identity_of
from torchtitan_lr.training.loading import build_model_args

# One example of every kind: a range of the schema and of torchtitan's keys, a choice, what depends
# on another key, on the ranks, on the model, on a file.
REFUSALS = [
    # option, value as told, what would work
    ("training.seq_len=0", "0", "a positive"),
    ("training.global_batch_size=33", "33", "a multiple of 16 (training.local_batch_size 8 x 2"),
    ("training.dataset=wikipedia", "'wikipedia'", "one of cpython"),
    ("validation.steps=0", "0", "a positive integer, or -1"),
    ("validation.seq_len=512", "512", "at most training.seq_len (128)"),
    ("checkpoint.load_step=7", "7", "-1: "),
    ("checkpoint.initial_load_path=/no", "'/no'", "the folder of one complete checkpoint"),
    ("checkpoint.exclude_from_loading=optimiser", "'optimiser'", "optimizer, lr_scheduler"),
    ("parallelism.tensor_parallel_degree=3", "3", "a divisor of the 4 ranks: 1, 2, 4"),
    ("activation_checkpoint.mode=memory_budget", "'memory_budget'", "unless compile.enable"),
    ("model.name=llama3", "'llama3'", "one of llama_cola, llama_full, llama_lax, llama_svd"),
    ("parallelism.tp_plan=vanila", "'vanila'", " (did you mean 'vanilla'?)"),
    ("model.hf_assets_path=/no/such", "'/no/such'", "a folder that holds tokenizer.json"),
    ("experimental.custom_import=nosuch.sub", "'nosuch.sub'", "a module that can be imported"),
    ("low_rank.rank_ffn=129", "129", "a rank from 1 to 128"),
    ("caat.sync_fraction=0.5", "0.5", "1 unless caat.lanes is more than 1"),
    ("parallelism.tp_plan=caat", "'caat'", "caat.lanes of more than 1"),
]

# Keys of torchtitan that nothing here reads.
NOT_READ = (
    *("memory_estimation.enable", "checkpoint.initial_load_in_hf_quantized"),
    "checkpoint.create_seed_checkpoint",
    *("experimental.custom_args_module=other", "low_rank.lax_gate=scalar"),
)


ROW_SHARED = ("--parallelism.context_parallel_degree=2", "--parallelism.tensor_parallel_degree=2")


@pytest.mark.parametrize(
    ("options", "device", "want"),
    [
        (
            "training.seq_len=126 validation.no_enable",
            "cpu",
            "training.seq_len: got 126, expected a multiple of 4: 2 * ",
        ),
        (
            "training.seq_len=128",
            "cuda",
            "context_parallel_degree: got 2, expected 1 on a GPU in fl",
        ),
    ],
)
def test_rows_that_ranks_cannot_share(options, device, want):
    given = [f"--{option}" for option in options.split()]
    assert want in refusal(*ROW_SHARED, *given, device=device)


def test_what_would_be_ignored_is_refused():
    for option in NOT_READ:
        assert refusal(f"--{option}").startswith(f"{option.partition('=')[0]}: got ")


GPU_ONLY = [
    ("profiling.enable_profiling", "True", "false on a CPU"),
    ("training.enable_cpu_offload", "True", "false on a CPU"),
]

COMPILED = ("--compile.enable", "--parallelism.tensor_parallel_degree=2")


def test_compiled_tensor_parallel_blocks_may_not_repeat_attention_on_a_cpu(monkeypatch):
    monkeypatch.setenv("CXX", "true")  # any compiler that exists
    full = "--activation_checkpoint.mode=full"
    text = refusal(*COMPILED, full)
    assert text.startswith("activation_checkpoint.mode: got 'full', expected 'none' or")
    check(*COMPILED, full, device="cuda")
    check(COMPILED[0], "--parallelism.tensor_parallel_degree=1", full)
    check(*COMPILED, "--activation_checkpoint.mode=low_rank")


@pytest.mark.parametrize(("option", "got", "want"), REFUSALS + GPU_ONLY)
def test_refusals_name_key_value_and_what_works(option, got, want, tmp_path):
    text = refusal(f"--{option}", f"--job.dump_folder={tmp_path}")
    key = option.partition("=")[0]
    blamed = {"training.dataset=local": "training.dataset_path"}.get(option, key)
    assert text.startswith(f"{blamed}: got {got}, expected ")
    assert want in text


ACCEPTED = [
    ["--training.max_norm=inf", "--training.global_batch_size=32", "--optimizer.beta1=0"],
    ["--training.global_batch_size=-1", "--lr_scheduler.warmup_steps=0", "--validation.steps=-1"],
    ["--training.steps=5", "--comm.mode=fake_backend", "--lr_scheduler.total_steps=100000"],
    ["--validation.no_enable", "--validation.seq_len=4096", "--checkpoint.keep_latest_k=0"],
    ["--checkpoint.no_enable", "--checkpoint.load_step=7"],
    [
        "--parallelism.tensor_parallel_degree=1",
        "--parallelism.data_parallel_replicate_degree=4",
        "--parallelism.data_parallel_shard_degree=1",
    ],
    ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
    ["--model.name=llama_lax", "--low_rank.lax_gate=scalar"],
    ["--debug.seed=9223372036854775807"],
]


@pytest.mark.parametrize("argv", ACCEPTED, ids=" ".join)
def test_no_false_refusals(argv, tmp_path):
    check(*argv, f"--job.dump_folder={tmp_path}")


@pytest.mark.parametrize("option", [case[0] for case in GPU_ONLY])
def test_what_a_cpu_refuses_a_gpu_takes(option, tmp_path):
    check(f"--{option}", f"--job.dump_folder={tmp_path}", device="cuda")


def test_vocabulary_smaller_than_the_tokenizers(tmp_path):
    assert FLAVORS["cola"]["debug"].vocab_size == 4096
    folder = tmp_path / "big"
    folder.mkdir()
    import tokenizers

    words = {f"w{i}": i for i in range(4097)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    text = refusal(f"--model.hf_assets_path={folder}", f"--job.dump_folder={tmp_path}")
    assert text.startswith("model.hf_assets_path: got ")
    assert "at most 4096 tokens for llama_cola debug, or model.vocab_size = 4097" in text
    # What the refusal proposes works.
    options = [f"--model.hf_assets_path={folder}", f"--job.dump_folder={tmp_path}"]
    config = build_job_config([f"--job.config_file={MAIN}", *options, "--model.vocab_size=4097"])
    check_vocabulary(config, 4, "cpu")
    assert build_model_args(config).vocab_size == 4160


def test_load_step_lists_what_there_is(tmp_path):
    folder = tmp_path / "checkpoint"
    whole = {"train_state": {}, "optimizer": {}, "lr_scheduler": {}, "dataloader": {}}
    for step in (10, 9, 100, 110):
        (folder / f"step-{step}").mkdir(parents=True)
        if step != 110:  # it has a folder, but was never finished
            (folder / f"step-{step}" / ".metadata").touch()
            Record({"model": {}} | (whole if step < 100 else {})).write(folder / f"step-{step}")
    (folder / "step-100/.metadata").unlink()  # in Hugging Face's format
    for step in (11, 110):
        text = refusal(f"--checkpoint.load_step={step}", f"--job.dump_folder={tmp_path}")
        assert text == f"checkpoint.load_step: got {step}, expected one of 9, 10, 100"
    check("--checkpoint.load_step=10", f"--job.dump_folder={tmp_path}")
    text = refusal("--checkpoint.load_step=100", f"--job.dump_folder={tmp_path}")
    assert f"{folder}/step-100', expected one with train_state: it holds model; " in text
    text = refusal(f"--checkpoint.initial_load_path={folder}/step-110")
    assert text.endswith(f"; in {folder} are the steps 9, 10, 100")
    assert refusal(f"--checkpoint.initial_load_path={folder}").endswith("9, 10, 100")
    check(f"--checkpoint.initial_load_path={folder}/step-9")


def test_a_checkpoint_of_another_family_is_refused_before_any_rank(tmp_path):
    model = fingerprint.model_fingerprint(FLAVORS["cola"]["debug"])
    step = tmp_path / "checkpoint/step-5"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    states = {"model": model, "train_state": {}, "optimizer": {}, "dataloader": {}}
    Record(states).write(step)
    here, svd = f"--job.dump_folder={tmp_path}", "--model.name=llama_svd"
    check(here, "--training.seq_len=256")
    line = f"model.name: got 'llama_svd', expected 'llama_cola' as in {step}, which holds another"
    assert refusal(here, svd).startswith(line)
    elsewhere = [f"--job.dump_folder={tmp_path}/new", f"--checkpoint.initial_load_path={step}"]
    assert refusal(*elsewhere, svd).startswith(line)
    for content in ("{", "[]", '{"format": 2}', json.dumps({"format": 1, "checksum": 1})):
        (step / "step.json").write_text(content)
        for where in ([here], elsewhere):
            line = refusal(*where, svd)
            assert line.startswith(f"checkpoint: got '{step}', expected a whole one (step.json")


def test_residuals_belong_to_their_layout(tmp_path):
    step = tmp_path / "checkpoint/step-5"
    step.mkdir(parents=True)
    (step / ".metadata").touch()
    options = [f"--job.dump_folder={tmp_path}", "--grad_compression.codec=sparse"]
    options += ["--parallelism.tensor_parallel_degree=1", "--training.local_batch_size=4"]
    config = build_job_config([f"--job.config_file={MAIN}", *options])
    saved = identity_of(config, 4, configured.configured_args(config), "")
    saved |= {"model": {}, "dataloader": {}}
    Record(saved).write(step)
    check(*options)
    for option, line in {
        "--grad_compression.min_size=5000": "grad_compression.min_size: got 5000, expected 16384",
        "--parallelism.data_parallel_replicate_degree=2": "parallelism.data_parallel_replicate_d",
    }.items():
        assert refusal(*options, option).startswith(line)
        way = ["--checkpoint.load_step=5", "--checkpoint.exclude_from_loading=grad_compression"]
        assert all(part in refusal(*options, option) for part in way)
        check(*options, option, *way)
    check(*options, "--grad_compression.codec=none")
    Record({key: value for key, value in saved.items() if key != "grad_compression"}).write(step)
    assert "expected one with grad_compression: it holds " in refusal(*options)


def test_cpu_offload_needs_shards(tmp_path):
    """And an optimizer that sends nothing of its state, which would be on the CPU."""
    argv = ["--training.enable_cpu_offload", f"--job.dump_folder={tmp_path}"]
    check(*argv, device="cuda")
    text = refusal(*argv, "--optimizer.name=Muon", device="cuda")
    assert text == "training.enable_cpu_offload: got True, expected false with Muon"
    argv.append("--parallelism.data_parallel_replicate_degree=2")
    text = refusal(*argv, device="cuda")
    assert text.startswith("training.enable_cpu_offload: got True, expected false unless")
