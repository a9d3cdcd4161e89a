# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Hugging Face's LLaMAs and our own exports as checkpoints, against transformers."""

import copy
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import ROOT, Command
from tests.support.run_folders import loaded
from tests.unit.hf.hf_models import exact, model_of
from tests.unit.tiny import max_error, tokens
from torchtitan_lr.checkpoints.record import read_step
from torchtitan_lr.checkpoints.saving import verified
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.export import export_hf
from torchtitan_lr.hf.exported import read_args, read_weights
from torchtitan_lr.hf.import_hf import write_step_zero
from torchtitan_lr.training.loading import as_model, load_weights

import_hf = Command("import")

ASSETS = ROOT / "torchtitan_lr/data/assets/bpe4k"
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = {
    "llama2": {"rms_norm_eps": 1e-5},
    "tinyllama": {"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "llama3": {"num_key_value_heads": 2, "rope_parameters": SCALED},
    "smollm2": {
        "num_key_value_heads": 1,
        "num_attention_heads": 3,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    },
}


def build(shape="llama2", dtype=torch.float64, **changes):
    """A random model of transformers, whose norms are no longer one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    values = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 128,
    }
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**{**values, **SHAPES[shape], **changes})).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        else:
            parameter.data *= 4
    return model.eval()


def write(model, folder, version=5, **options):
    """Save a model with its tokenizer; version 4 has the rotary keys of transformers 4."""
    model.save_pretrained(folder, **options)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((ASSETS / name).read_bytes())
    if version == 4:
        rotary = SCALED if model.config.rope_parameters.get("factor") else {}
        edit(
            folder,
            rope_parameters=None,
            rope_theta=model.config.rope_parameters["rope_theta"],
            rope_scaling={k: v for k, v in rotary.items() if k != "rope_theta"} or None,
        )
    return folder


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


def bring_in(folder, out, *options):
    assert import_hf.main([str(folder), str(out), *map(str, options)]) == 0
    step = out / "checkpoint" / "step-0"
    assert verified(step).finite
    return loaded(step)[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A folder of a LLaMA with grouped queries."""
    return write(build("tinyllama", torch.float32), tmp_path_factory.mktemp("hf"))


IDS = torch.randint(4096, (2, 96), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("shape", "version", "shards"),
    [("llama2", 4, 1), ("tinyllama", 5, 1), ("llama3", 5, 4), ("llama3", 4, 1), ("smollm2", 5, 1)],
)
def test_logits_are_those_of_transformers(shape, version, shards, tmp_path, capsys):
    theirs = build(shape)
    size = "50GB" if shards == 1 else "400KB"
    folder = write(theirs, tmp_path / "hf", version, max_shard_size=size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shards > 1)
    ours = bring_in(folder, tmp_path / "out")
    expected = logits_of(copy.deepcopy(theirs).float(), IDS)
    tied = theirs.config.tie_word_embeddings
    assert ("the embedding is also the head" in capsys.readouterr().err) == tied
    assert max_error(ours(IDS), logits_of(exact(theirs, ours), IDS)) < 1e-12
    assert max_error(ours.float()(IDS), expected) < 1e-5  # with transformers' own angles


def test_halves_are_read_exactly_and_old_tables_are_skipped(tmp_path):
    theirs = build("tinyllama", torch.bfloat16)
    folder = write(theirs, tmp_path / "hf")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(weights, folder / "model.safetensors")
    ours = bring_in(folder, tmp_path / "out")
    assert ours.output.weight.dtype == torch.float32
    assert torch.equal(ours.output.weight, theirs.lm_head.weight.float())
    half = bring_in(folder, tmp_path / "half", "--dtype", "bfloat16")
    assert torch.equal(half.output.weight, theirs.lm_head.weight)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": "mistral"}, "model_type: got 'mistral', expected 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_scaling: got 'li"),
        ({"hidden_size": None}, "model.dim: got None, expected a positive integer"),
        ({"num_hidden_layers": 4}, "a tensor model.layers.3."),
        # A number without an end, one too large to allocate, one too long for a float, other types.
        ({"rms_norm_eps": math.inf}, "model.norm_eps: got inf"),
        ({"rope_parameters": None, "rope_theta": 0.0}, "model.rope_theta: got 0.0"),
        ({"num_hidden_layers": 10**30}, "model.n_layers: got 1000"),
        ({"vocab_size": 2**62}, "model.vocab_size: got 4611"),
        ({"hidden_size": [64]}, "model.dim: got [64]"),
        ({"torch_dtype": 5, "eos_token_id": "x", "num_hidden_layers": 0}, "model.n_layers: got 0"),
    ],
)
def test_what_a_llama_full_has_not_is_refused(changes, line, plain, tmp_path, capsys):
    folder = shutil.copytree(plain, tmp_path / "hf")
    edit(folder, **changes)
    assert line in import_hf.refusal(capsys, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_and_other_weights_are_refused(plain, tmp_path, capsys):
    folder, file = shutil.copytree(plain, tmp_path / "hf"), tmp_path / "hf/model.safetensors"
    weights = load_file(file)
    edit(folder, tie_word_embeddings=True)
    line = import_hf.refusal(capsys, folder, tmp_path / "out")
    assert line.startswith("error: tie_word_embeddings: got True, expected false")
    edit(folder, tie_word_embeddings=False)
    norm = "model.norm.weight"
    changes = {
        "DIR: got 'norm.weight', expected finite weights": weights[norm].index_fill(
            0, torch.tensor([3]), math.nan
        ),
        "expected floating-point weights": weights[norm].to(torch.int8),  # quantized
    }
    for line, changed in changes.items():
        save_file(weights | {norm: changed}, file)
        assert line in import_hf.refusal(capsys, folder, tmp_path / "out")
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file(weights | {bias: torch.ones(48)}, file)
    assert f"without {bias}" in import_hf.refusal(capsys, folder, tmp_path / "out")
    file.write_bytes(file.read_bytes()[:5000])
    assert "a whole file of safetensors" in import_hf.refusal(capsys, folder, tmp_path / "out")
    file.unlink()
    (folder / "pytorch_model.bin").touch()
    assert "save_pretrained writes it" in import_hf.refusal(capsys, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", ["svd", "lax_gated", "lanes"])
def test_our_own_exports_become_the_same_model(case, tmp_path):
    ours, folder = model_of(case), tmp_path / "exported"
    folder.mkdir()
    (tmp_path / "out").mkdir()
    export_hf(ours.model_args, ours.state_dict(), folder, keep_factors=case == "svd")
    args, tied = read_args(folder)
    assert not tied and args.family == ours.model_args.family
    write_step_zero(args, read_weights(folder, args, tied), tmp_path / "out")
    again = as_model(args, load_weights(tmp_path / "out/checkpoint/step-0", args))
    ids = tokens(ours.model_args)
    assert torch.equal(again(ids), ours(ids))


def test_an_imported_folder_can_be_moved_and_trained(tmp_path, capsys):
    """Every path of its record and of its TOML is its own; loading it elsewhere is the same."""
    build().save_pretrained(tmp_path / "theirs")
    there, moved = tmp_path / "there", tmp_path / 'moved "é"'
    argv = [tmp_path / "theirs", there, "--tokenizer", ASSETS, "--dtype", "float32", "--json"]
    result = json.loads(import_hf.ask(capsys, *argv)[1])
    assert result["model"] == "llama_full" and result["matrices"] == []
    model, tokenizer = loaded(there / "checkpoint/step-0")
    assert result["parameters"] == sum(p.numel() for p in model.parameters())
    there.rename(moved)
    again, same = loaded(moved / "checkpoint/step-0")
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert same.encode("def f") == tokenizer.encode("def f")
    arguments = [f"--job.config_file={moved}/train.toml"]
    config = build_job_config(arguments)
    for path in (
        config.model.flavor,
        config.model.hf_assets_path,
        config.checkpoint.initial_load_path,
        config.job.dump_folder,
    ):
        assert path.startswith(f"{moved}/")
    assert config.training.global_batch_size == 16 and config.validation.enable
    check_job_config(config, 1, "cpu")
    assert str(there) not in (moved / "job_config.json").read_text()
    stored = read_step(moved / "checkpoint/step-0").states["model"]
    assert stored["model.hf_assets_path"].startswith("sha256:")
    # The fingerprint keeps another model from loading it.
    with pytest.raises(ConfigError, match=r"model\.name: got 'llama_cola', expected 'llama_full'"):
        check_job_config(build_job_config([*arguments, "--model.name=llama_cola"]), 1, "cpu")


@pytest.mark.parametrize("version", [4, 5])
def test_there_and_back_everything_is_what_it_was(version, tmp_path):
    """From the cache of the hub, whose files are links, into a checkpoint and out again."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    theirs = build("llama3", torch.float32, bos_token_id=0, eos_token_id=[1, 7])
    snapshot, blobs = tmp_path / "models--a--b/snapshots/c0ffee", tmp_path / "models--a--b/blobs"
    write(theirs, snapshot, version)
    ends = {"bos_token_id": 0, "eos_token_id": [1, 7], "temperature": 0.6, "do_sample": True}
    (snapshot / "generation_config.json").write_text(json.dumps(ends, indent=3))
    (snapshot / "chat_template.jinja").write_text("{{ messages }}")
    (snapshot / "additional_chat_templates").mkdir()
    (snapshot / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    blobs.mkdir()
    for number, file in enumerate([file for file in snapshot.rglob("*") if file.is_file()]):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    (tmp_path / "mine").symlink_to(snapshot)  # as is a folder of a user
    bring_in(tmp_path / "mine", tmp_path / "in")
    assert Command("export").main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    folders = (snapshot, tmp_path / "out")
    configs = [AutoConfig.from_pretrained(folder).to_dict() for folder in folders]
    assert configs[0] == configs[1] | {"_name_or_path": str(snapshot)}
    first, last = map(AutoTokenizer.from_pretrained, folders)
    assert first.chat_template == last.chat_template
    same = (tmp_path / "out" / "generation_config.json").read_bytes()
    assert same == (snapshot / "generation_config.json").read_bytes()
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [1, 7]
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_nothing_half_made_is_left(plain, tmp_path, capsys):
    out = tmp_path / "out"
    svd = ("--family", "svd", "--rank", 8, "--calibration", tmp_path / "none.txt")
    assert "--calibration" in import_hf.refusal(capsys, plain, out, *svd)
    assert "--tokenizer" in import_hf.refusal(capsys, plain, out, "--tokenizer", tmp_path / "none")
    assert not out.exists()
    copied = shutil.copytree(plain, tmp_path / "copied")
    (tmp_path / "secret").write_text("secret")
    (copied / "chat_template.jinja").symlink_to(tmp_path / "secret")
    assert "a link to outside" in import_hf.refusal(capsys, copied, out)
    assert not out.exists()
