# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Export weights for transformers: as Hugging Face's LLaMA, or with the code of the model.

With them goes a model card, the README.md of the export.
"""

import html
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData, save_torch_state_dict
from safetensors import SafetensorError

from torchtitan_lr import hf
from torchtitan_lr.errors import ConfigError, escaped
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import SUFFIX
from torchtitan_lr.models.state_dict_adapter import LlamaStateDictAdapter
from torchtitan_lr.titan.base import drop_marker
from torchtitan_lr.training import history
from torchtitan_lr.training.loading import Weights, read_record

HF_CONFIG = "config.json"
HF_CODE = "modeling_torchtitan_lr"  # the module of code in an export of what is no LLaMA
CODED = "torchtitan_lr"  # the table that ``config.json`` then has
# Its ``hidden_act``: LLaMA's own class fails with it, where it would draw the linears anew.
CODED_ACT = "torchtitan_lr: load with trust_remote_code=True"
# What the table says, by the names of `LlamaArgs`.
CODED_KEYS = (
    *("family", "activation", "rank_attention", "rank_ffn"),
    *("lax_gate", "lanes", "sync_fraction"),
)

NUMBERS = {  # keys with the names of `LlamaArgs`, whose defaults of the last ones are LLaMA's
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "max_position_embeddings": "max_seq_len",
}
SCALING = {
    "factor": "scaling_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}

_FAMILIES = {  # for which the exported code has linears, and what the card calls them
    "full": "full-rank LLaMA",
    "svd": "LLaMA with factorised linears, y = B A x",
    "cola": "LLaMA with a nonlinearity in every bottleneck (CoLA), y = B σ(A x)",
    "lax": "CoLA whose latents cross from block to block (LaX)",
}

_TEXT = """# {name}, step {step}

A {kind}, {origin}.

| | |
| --- | --- |
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{code})
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""


def export_hf(
    args: LlamaArgs,
    weights: Weights,
    out_dir: Path,
    dtype: torch.dtype | None = None,
    keep_factors: bool = False,
) -> None:
    """Write weights, ``config.json`` and code; errors as for `check_hf_exportable`."""
    dtype = dtype or next(iter(weights.values())).dtype
    config, converted = for_transformers(args, weights, dtype, keep_factors)
    write_json(out_dir / HF_CONFIG, config)
    if CODED in config:
        shutil.copyfile(Path(hf.__path__[0]) / f"{HF_CODE}.py", out_dir / f"{HF_CODE}.py")
    rounded = {name: tensor.to(dtype) for name, tensor in converted.items()}
    try:
        save_torch_state_dict(rounded, out_dir, max_shard_size="5GB")
    except SafetensorError as error:  # an error of the system, such as a full disk
        raise OSError(str(error)) from error
    for file in out_dir.glob("*.safetensors"):  # safetensors lets only the owner read it
        file.chmod((out_dir / HF_CONFIG).stat().st_mode)


def for_transformers(
    args: LlamaArgs, weights: Weights, dtype: torch.dtype, keep_factors: bool = False
) -> tuple[dict[str, Any], Weights]:
    """Return the contents of ``config.json``, and the weights by LLaMA's names.

    What equals a full-rank LLaMA becomes transformers' own, unless ``keep_factors``: factors are
    multiplied in fp32 or better. Errors as for `check_hf_exportable`.
    """
    check_hf_exportable(args, keep_factors)
    coded = not is_hf_llama(args, keep_factors)
    if args.low_rank and not coded:
        wide = torch.promote_types(next(iter(weights.values())).dtype, torch.float32)
        weights = {name: tensor.to(wide) for name, tensor in weights.items()}
    adapter = LlamaStateDictAdapter(args, None, coded=coded)
    return _build_config(args, dtype, coded), adapter.to_hf(weights)


def is_hf_llama(args: LlamaArgs, keep_factors: bool = False) -> bool:
    """Return whether the export is transformers' own LLaMA."""
    adapter = LlamaStateDictAdapter(args, hf_assets_path=None)
    return adapter.is_llama and not (keep_factors and args.low_rank)


def check_hf_exportable(args: LlamaArgs, keep_factors: bool = False) -> None:
    """Raise a ConfigError for another package's family, or for factors where there are none."""
    if keep_factors and not args.low_rank:
        name = args.model_family.model_name
        raise ConfigError("--keep_factors", name, "a low-rank family: llama_full has no factors")
    if not is_hf_llama(args) and args.family not in _FAMILIES:
        names = ", ".join(f"llama_{family}" for family in _FAMILIES)
        want = f"one of {names}, whose code an export can bring"
        raise ConfigError("model.name", args.model_family.model_name, want)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a dictionary, indented."""
    path.write_text(json.dumps(values, indent=2) + "\n")


def _build_config(args: LlamaArgs, dtype: torch.dtype, coded: bool = False) -> dict[str, Any]:
    """Return ``config.json``; the rotary settings are of version 4, which later versions read."""
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config |= {theirs: getattr(args, ours) for theirs, ours in NUMBERS.items()}
    config |= {
        "num_key_value_heads": args.kv_heads,
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # The tokenizer defines these ids; LLaMA's defaults would be other tokens.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if args.rope_scaling is not None:
        numbers = {theirs: getattr(args.rope_scaling, ours) for theirs, ours in SCALING.items()}
        config["rope_scaling"] = {"rope_type": "llama3"} | numbers
    if coded:
        name = "TorchtitanLRForCausalLM"
        config["architectures"] = [name]
        config["auto_map"] = {"AutoModelForCausalLM": f"{HF_CODE}.{name}"}
        config["hidden_act"] = CODED_ACT
        config[CODED] = {key: getattr(args, key) for key in CODED_KEYS}
    return config


def write_card(
    args: LlamaArgs, config: Any, step_dir: Path, out_dir: Path, coded: bool, licence: str
) -> None:
    """Write the model card of an export of a step; ``coded`` says whether it brings its code."""
    step_dir = step_dir.resolve()
    step, flavor = step_dir.name.removeprefix("step-"), config.model.flavor
    name, section = args.model_family.model_name, read_record(step_dir).get("checkpoint")
    origin = "pre-trained with torchtitan_lr"
    if step == "0":
        origin = "imported, and not trained with torchtitan_lr"
    elif isinstance(section, dict) and section.get("initial_load_path"):
        origin = "fine-tuned from other weights with torchtitan_lr"  # no place is told
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["torchtitan_lr", name],
        license=licence or None,
    )
    rows = {name: value for name, value in drop_marker(asdict(args)).items() if value is not None}
    if step != "0":
        rows |= _run_rows(config, step_dir, step)
    text = _TEXT.format(
        name=name if flavor.endswith(SUFFIX) else f"{name} {_plain(flavor)}",
        step=_plain(step),
        kind=_FAMILIES.get(args.family, f"model of the family {args.family}"),
        origin=origin,
        table="\n".join(f"| {key} | {_plain(value)} |" for key, value in rows.items()),
        code=", trust_remote_code=True" if coded else "",
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{text}").save(out_dir / "README.md")


def _plain(value: Any) -> str:
    """Return a text as Markdown shows it: no HTML, no link, no picture and no other cell."""
    text = html.escape(escaped(str(value)), quote=False)
    return re.sub(r"[\\`*\[\]|~]", r"\\\g<0>", text)


def _run_rows(config: Any, step_dir: Path, step: str) -> dict[str, Any]:
    """Return rows from the run's configuration and history, up to the step."""
    training = config.training
    corpora = [each if isinstance(each, dict) else vars(each) for each in training.mixture]
    corpora = corpora or [{"dataset": training.dataset, "path": training.dataset_path}]
    # Of paths the last part, since the rest is the training machine's.
    names = [f"{each['dataset']} {PurePath(str(each.get('path') or '')).name}" for each in corpora]
    rows: dict[str, Any] = {"data": ", ".join(name.strip() for name in names)}
    for record in history.read_history(step_dir.parent.parent / history.HISTORY_FILE):
        if not step.isdecimal() or record["step"] > int(step):
            break
        if history.TOKENS_SEEN in record:
            rows["tokens"] = f"{record[history.TOKENS_SEEN]:,}"
        validated = record.get(history.VALIDATION_LOSS)
        for what, loss in (("training", history.train_loss(record)), ("validation", validated)):
            if loss is not None:
                text = f"{loss:.4f} nats per token, perplexity {history.perplexity(loss):.2f}"
                rows[f"{what} loss"] = f"{text}, at step {record['step']}"
    return rows
