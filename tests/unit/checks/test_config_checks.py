# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Values that cannot work are refused in one line, and no others are."""

import os
import sys

import pytest

from tests.support.config_checks import MAIN, check, refusal, without_privileges
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.checks.values import check_vocabulary
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.training.loading import build_model_args

REPLICATE = "parallelism.data_parallel_replicate_degree"
RIVAL = "optimizer.name=PowerSGD-4 experimental.custom_import=scripts.research.race.rivals "
RIVAL += "model.name=llama_full parallelism.tensor_parallel_degree=1 checkpoint.no_enable"

# One example of every kind: a range of the schema and of torchtitan's keys, a choice, what depends
# on another key, on the ranks, on the model, on a file. The first option is the one to blame.
REFUSALS = [
    # options, value as told, what would work
    ("training.seq_len=0", "0", "a positive"),
    ("training.global_batch_size=33", "33", "a multiple of 16 (training.local_batch_size 8 x 2"),
    ("training.dataset=wikipedia", "'wikipedia'", "one of cpython"),
    ("validation.steps=0", "0", "a positive integer, or -1"),
    ("validation.seq_len=512", "512", "at most training.seq_len (128)"),
    ("checkpoint.load_step=7", "7", "-1: "),
    ("checkpoint.initial_load_path=/no", "'/no'", "the folder of one complete checkpoint"),
    ("checkpoint.exclude_from_loading=optimiser", "'optimiser'", "optimizer, lr_scheduler"),
    ("checkpoint.async_mode=async_with_pinned_mem", "'async_with_pinned_mem'", "or 'async'"),
    ("profiling.enable_memory_snapshot", "True", "false on a CPU"),
    ("parallelism.tensor_parallel_degree=3", "3", "a divisor of the 4 ranks: 1, 2, 4"),
    ("activation_checkpoint.mode=memory_budget", "'memory_budget'", "unless compile.enable"),
    ("activation_checkpoint.mode=full compile.enable", "'full'", "'none' or 'low_rank'"),
    (
        "activation_checkpoint.keep_inputs=on activation_checkpoint.mode=full",
        "'on'",
        "'auto' or 'off'",
    ),
    ("activation_checkpoint.keep_inputs=on model.name=llama_full", "'on'", "low-rank family"),
    ("model.name=llama3", "'llama3'", "one of llama_cola, llama_full, llama_lax, llama_svd"),
    ("parallelism.tp_plan=vanila", "'vanila'", " (did you mean 'vanilla'?)"),
    ("model.hf_assets_path=/no/such", "'/no/such'", "a folder that holds tokenizer.json"),
    ("experimental.custom_import=nosuch.sub", "'nosuch.sub'", "a module that can be imported"),
    ("low_rank.rank_ffn=129", "129", "a rank from 1 to 128"),
    ("caat.sync_fraction=0.5", "0.5", "1 unless caat.lanes is more than 1"),
    ("parallelism.tp_plan=caat", "'caat'", "with caat.lanes = 1"),
    ("training.seq_len=126 parallelism.context_parallel_degree=2 validation.no_enable", "126", "4"),
    ("training.seq_len=0 comm.mode=fake_backend", "0", "a positive"),
    ("grad_compression.codec=gzip", "'gzip'", "'none', 'sparse', 'sketch'"),
    ("grad_compression.theta=1", "1.0", "[0, 1)"),
    ("grad_compression.min_size=99999999 grad_compression.codec=sparse", "9999", "some tensor"),
    ("outer.every=9 training.steps=8", "9", "at most training.steps (8), or 0"),
    ("outer.fragments=5 outer.every=9", "5", "at most 4: fragments are of"),
    ("outer.bits=3", "3", "32, 16, 8, 4 or 2"),
    ("outer.every=9 optimizer.name=TSRAdam optimizer.tsr_rank=32", "9", "0 with TSRAdam"),
    ("grad_compression.codec=sparse outer.every=9", "'sparse'", "'none' with outer.every > 0"),
    ("training.dtype=bfloat16 outer.every=9", "'bfloat16'", "'float32' with outer.every > 0"),
    (f"{REPLICATE}=1 {RIVAL}", "1", "PowerSGD-4"),
    (f"training.mixed_precision_reduce=bfloat16 {REPLICATE}=4 {RIVAL}", "'bfloat16'", "PowerSGD-4"),
    # The dump folder alone is locked, and proved to be shared.
    ("checkpoint.folder=/scratch/saves", "'/scratch/saves'", "a folder within job.dump_folder"),
    ("checkpoint.folder=../saves", "'../saves'", "a folder within job.dump_folder"),
    ("checkpoint.folder=s3://bucket/saves", "'s3://bucket/saves'", "a shared file system"),
    ("profiling.profile_freq=3 profiling.enable_profiling", "3", "profiler_active, 4, or more"),
    # Keys of torchtitan that nothing here reads.
    ("memory_estimation.enable", "True", "not supported"),
    ("checkpoint.create_seed_checkpoint", "True", "the same weights"),
    ("experimental.custom_args_module=other", "'other'", "leave it out"),
    ("low_rank.lax_gate=scalar", "'scalar'", ""),
]


@pytest.mark.parametrize(("options", "got", "want"), REFUSALS)
def test_refusals_name_key_value_and_what_works(options, got, want, tmp_path):
    given = [f"--{option}" for option in options.split()]
    text = refusal(*given, f"--job.dump_folder={tmp_path}")
    assert text.startswith(f"{options.split()[0].partition('=')[0]}: got {got}")
    assert want in text


ACCEPTED = [
    "training.max_norm=inf training.global_batch_size=32 optimizer.beta1=0",
    "lr_scheduler.warmup_steps=0 validation.steps=-1 debug.seed=9223372036854775807",
    "training.steps=5 comm.mode=fake_backend lr_scheduler.total_steps=100000",
    "validation.no_enable validation.seq_len=4096 checkpoint.no_enable checkpoint.load_step=7",
    "parallelism.tensor_parallel_degree=1 parallelism.data_parallel_replicate_degree=4",
    "activation_checkpoint.mode=selective activation_checkpoint.selective_ac_option=op",
    "model.name=llama_lax low_rank.lax_gate=scalar",
    "compile.enable activation_checkpoint.mode=low_rank",
    "compile.enable activation_checkpoint.mode=full parallelism.tensor_parallel_degree=1",
]


@pytest.mark.parametrize("options", ACCEPTED)
def test_no_false_refusals(options, tmp_path):
    check(*[f"--{option}" for option in options.split()], f"--job.dump_folder={tmp_path}")


def test_what_a_gpu_takes_and_a_cpu_does_not(tmp_path):
    here = f"--job.dump_folder={tmp_path}"
    check("--compile.enable", "--activation_checkpoint.mode=full", here, device="cuda")
    text = refusal("--parallelism.context_parallel_degree=2", here, device="cuda")
    assert text.startswith("parallelism.context_parallel_degree: got 2, expected 1, unless flash")
    offload = ["--training.enable_cpu_offload", here]  # state that is sent would be on the CPU
    check(*offload, device="cuda")
    text = refusal(*offload, "--optimizer.name=Muon", device="cuda")
    assert text == "training.enable_cpu_offload: got True, expected false with Muon"


def test_vocabulary_smaller_than_the_tokenizers(tmp_path):
    assert FLAVORS["cola"]["debug"].vocab_size == 4096
    folder = tmp_path / "big"
    folder.mkdir()
    import tokenizers

    words = {f"w{i}": i for i in range(4097)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    options = [f"--model.hf_assets_path={folder}", f"--job.dump_folder={tmp_path}"]
    text = refusal(*options)
    assert text.startswith("model.hf_assets_path: got ")
    assert "at most 4096 tokens for llama_cola debug, or model.vocab_size = 4097" in text
    # What the refusal proposes works.
    config = build_job_config([f"--job.config_file={MAIN}", *options, "--model.vocab_size=4097"])
    check_vocabulary(config, 4, "cpu")
    assert build_model_args(config).vocab_size == 4160


@pytest.mark.parametrize(("key", "name"), [("job.dump_folder", ""), ("checkpoint.folder", "saves")])
def test_a_file_in_a_folders_place_is_refused(tmp_path, key, name):
    """The first save may be hours away."""
    folder = tmp_path / "dump"
    blocking = folder / name
    blocking.parent.mkdir(exist_ok=True)
    blocking.write_text("")
    options = [f"--job.dump_folder={folder}", "--checkpoint.folder=saves"]
    assert "a shared file system" in refusal("--job.dump_folder=s3://bucket/run")
    want = f"expected a folder that {blocking} does not block: it is a file"
    assert refusal(*options) == f"{key}: got {str(blocking)!r}, {want}"
    # The control: with a folder in that place the run may start.
    blocking.unlink()
    blocking.mkdir()
    check(*options)


@pytest.mark.skipif(
    sys.platform != "linux" and os.geteuid() == 0, reason="root may write everywhere"
)
def test_dump_folder_without_permission(tmp_path):
    closed, hidden = tmp_path / "closed", tmp_path / "hidden"
    (hidden / "run").mkdir(parents=True)
    closed.mkdir(0o500)
    hidden.chmod(0)
    for folder in (closed, hidden):
        argv = f"--job.dump_folder={folder}/run"
        text = without_privileges(lambda argv=argv: refusal(argv))
        assert text.startswith("job.dump_folder: got ") and f"a folder that {folder} lets" in text
        folder.chmod(0o700)  # nothing but the permission was in the way
        without_privileges(lambda argv=argv: check(argv))


SKETCH = ["--model.name=llama_full", "--training.local_batch_size=1"]
SKETCH += ["--parallelism.tensor_parallel_degree=1", "--grad_compression.codec=sketch"]


@pytest.mark.parametrize(
    ("world", "options", "least"),
    [
        (2, ["level=4x"], 0.9014),
        (8, ["level=10x"], 0.9904),
        (4, ["level=custom", "c=4", "theta=0.9"], 0.9495),
    ],
)
def test_a_sketch_that_would_not_peel_names_the_smallest_theta(world, options, least, tmp_path):
    here = [*SKETCH, f"--job.dump_folder={tmp_path}"]
    argv = [*here, *(f"--grad_compression.{option}" for option in options)]
    text = refusal(*argv, world=world)
    assert f"a theta of at least {least} (" in text and "does not peel" in text
    check(*argv, "--grad_compression.auto", world=world)
    c = {"2x": 2, "4x": 4, "10x": 10}.get(options[0].partition("=")[2], 4)
    at = [*here, "--grad_compression.level=custom", f"--grad_compression.c={c}"]
    check(*at, f"--grad_compression.theta={least}", world=world)
    refusal(*at, f"--grad_compression.theta={least - 0.0001:.4f}", world=world)


def test_the_two_hosts_of_hsdp_exchange_and_not_its_four_shards(tmp_path):
    replicas = "--parallelism.data_parallel_replicate_degree=2"
    here = [*SKETCH, f"--job.dump_folder={tmp_path}"]
    check(*here, "--grad_compression.level=2x", replicas, world=8)


PIPELINE = "--parallelism.pipeline_parallel"
STAGES = [
    *("--model.name=llama_lax", "--model.flavor=debug"),  # 4 blocks
    "--model.hf_assets_path=torchtitan_lr/data/assets/bpe4k",
    *("--training.seq_len=32", "--training.local_batch_size=8", f"{PIPELINE}_degree=2"),
]
ZBV = f"{PIPELINE}_schedule=ZBVZeroBubble"
LOOPED = f"{PIPELINE}_schedule=Interleaved1F1B"
SPLITS = {
    "missing": "tok_embeddings layers.0 layers.1, layers.2 norm output",
    "disorder": "tok_embeddings layers.1 layers.0, layers.2 layers.3 norm output",
    "three": "tok_embeddings, layers.0 layers.1, layers.2 layers.3 norm output",
    "alone": "tok_embeddings layers.0 layers.1 layers.2 layers.3 norm, output",
}


@pytest.mark.parametrize(
    ("arguments", "key", "want"),
    [
        ([f"{PIPELINE}_degree=3"], "degree", "a divisor of"),
        ([f"{PIPELINE}_schedule=DualPipeV"], "schedule", "one of 1F1B, GPipe, Interleaved1F1B"),
        ([f"{PIPELINE}_schedule_csv=x.csv"], "schedule_csv", "'' with a pipeline"),
        ([ZBV, "--compile.enable"], "compile.enable", "one backward, not two"),
        ([ZBV, f"{PIPELINE}_degree=4"], "degree", "fewer stages than 8, into which 4 blocks"),
        *[([split], "module_fqns_per_model_part", "2 stages which list") for split in SPLITS],
        ([f"{PIPELINE}_microbatch_size=8"], "microbatch_size", "makes 2 micro-batches, or a"),
        ([LOOPED, "--training.local_batch_size=5"], "microbatch_size", "for Interleaved1F1B"),
        *(([], "", ""), ([ZBV], "", ""), ([LOOPED], "", "")),  # what works
        ([f"{PIPELINE}_microbatch_size=8", f"{PIPELINE}_schedule=GPipe"], "", ""),
        ([LOOPED, f"{PIPELINE}_layers_per_stage=1"], "", ""),
    ],
)
def test_pipelines(arguments, key, want):
    split = SPLITS.get(arguments[0]) if arguments else None
    config = build_job_config([*STAGES, *([] if split else arguments)])
    if split:
        parts = [part.split() for part in split.split(",")]
        config.parallelism.module_fqns_per_model_part = parts
    if not key:
        check_job_config(config, 4, "cpu", data="none")
        return
    with pytest.raises(ConfigError) as info:
        check_job_config(config, 4, "cpu", data="none")
    assert key in info.value.key and want in str(info.value) and "\n" not in str(info.value)
