# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The README.md of an export: what the model is, what it was trained on, and how well it does."""

import math
from pathlib import Path
from typing import Any

import tomli_w
from huggingface_hub import ModelCard, ModelCardData

from torchtitan_lr.config.build import build_job_config, config_class
from torchtitan_lr.hf.loading import named_step, read_record
from torchtitan_lr.hf.step_zero import TRAIN_TOML
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.training import history
from torchtitan_lr.training.history import TRAIN_LOSS, VALIDATION_LOSS

CARD = "README.md"

_KINDS = {
    "full": "full-rank LLaMA",
    "svd": "LLaMA with factorised linears, y = B A x",
    "cola": "LLaMA with a nonlinearity in every bottleneck (CoLA), y = B σ(A x)",
    "lax": "CoLA whose latents cross from block to block (LaX)",
}


_TEXT = """# {name}, step {step}

A {kind}, pre-trained with torchtitan_lr.

| | |
| --- | --- |
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{more})
tokenizer = AutoTokenizer.from_pretrained("."{more})
```

A base model: it continues text. `{command}` in this folder repeats its training: {toml} holds every
value of the run that is not a default.
"""


def write_card(
    args: LlamaArgs, config: Any, step_dir: Path, out_dir: Path, written: int, coded: bool
) -> None:
    """Write the model card, from the run's record, its history and its arguments.

    Args:
        args: The model's arguments.
        config: The run's record, sections as attributes.
        step_dir: The exported checkpoint.
        out_dir: The export.
        written: Number of exported parameters.
        coded: Whether the model's code is in the export.
    """
    step_dir = named_step(step_dir)
    step = step_dir.name.removeprefix("step-")
    name = f"{args.model_family.model_name} {config.model.flavor}"
    loading = ", trust_remote_code=True" if coded else ""
    rows = _model_rows(args, written) + _run_rows(config, step_dir, step)
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["torchtitan_lr", args.model_family.model_name],
    )
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    ranks = _ranks(step_dir.parent.parent)
    command = f"{f'NGPU={ranks} ' if ranks else ''}torchtitan-lr train {TRAIN_TOML}"
    kind = _KINDS[args.family]
    text = _TEXT.format(
        name=name, step=step, kind=kind, table=table, more=loading, command=command, toml=TRAIN_TOML
    )
    (out_dir / TRAIN_TOML).write_text(run_toml(step_dir))
    ModelCard(f"---\n{data.to_yaml()}\n---\n{text}").save(out_dir / CARD)


def run_toml(step_dir: Path) -> str:
    """Return the TOML that repeats a run: all values of its record that are no defaults."""
    defaults = config_class()().to_dict()
    changed = _changed(build_job_config([], read_record(step_dir)).to_dict(), defaults)
    changed.get("job", {}).pop("config_file", None)
    return tomli_w.dumps({name: keys for name, keys in changed.items() if keys})


def _ranks(dump: Path) -> int | None:
    """Return a run's number of ranks: its speed, all ranks together, over the speed of one."""
    whole, one = "throughput/tokens_per_s", "throughput/tokens_per_s_per_device"
    records = history.read_history(dump / history.HISTORY_FILE)
    ratios = [record[whole] / record[one] for record in records if record.get(one)]
    return round(ratios[-1]) if ratios else None


def _changed(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return what differs, table by table; TOML has no None."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        usual = defaults.get(name)
        if isinstance(value, dict) and isinstance(usual, dict):
            value, usual = _changed(value, usual), {}
        if value is not None and value != usual:
            found[name] = value
    return found


def _model_rows(args: LlamaArgs, written: int) -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = [
        ("parameters", f"{written:,}"),
        (
            "width, blocks, heads (of keys)",
            f"{args.dim}, {args.n_layers}, {args.n_heads} ({args.kv_heads})",
        ),
        ("vocabulary", args.vocab_size),
        ("sequence length", args.max_seq_len),
    ]
    if args.low_rank:
        rows.append(("ranks of attention, feed-forward", f"{args.rank_attention}, {args.rank_ffn}"))
        rows.append(("nonlinearity (`low_rank.activation`)", args.activation))
    if args.model_family.gated:
        rows.append(("gate of the carried latents", args.lax_gate))
    if args.lanes > 1:
        rows.append(("CAAT-Net lanes, shared fraction", f"{args.lanes}, {args.sync_fraction:g}"))
    return rows


def _run_rows(config: Any, step_dir: Path, step: str) -> list[tuple[str, Any]]:
    """Return rows from the record and the history of the run."""
    training = config.training
    dump = step_dir.parent.parent
    records = history.read_history(dump / history.HISTORY_FILE)
    rows: list[tuple[str, Any]] = []
    dataset = getattr(training, "dataset", None)
    if dataset:
        path = getattr(training, "dataset_path", None)
        rows.append(("data", f"{dataset} ({path})" if path else dataset))
    rows.append(("steps", step))
    if not step.isdecimal():
        return rows
    past = [record for record in records if record["step"] <= int(step)]
    tokens = _tokens(training, past, int(step))
    if tokens is not None:
        rows.append(("tokens", f"{tokens:,}"))
    for key, what in ((TRAIN_LOSS, "training"), (VALIDATION_LOSS, "validation")):
        found = [record for record in past if record.get(key) is not None]
        if found:
            loss, at = found[-1][key], found[-1]["step"]
            text = f"{loss:.4f} nats per token, perplexity {math.exp(min(loss, 700)):.2f}"
            rows.append((f"{what} loss at step {at}", text))
    return rows


def _tokens(training: Any, past: list[dict[str, Any]], step: int) -> int | None:
    """Tokens seen up to a step: the history's number, else batch times length where known."""
    seen = [r["n_tokens_seen"] for r in past if r["step"] == step and "n_tokens_seen" in r]
    if seen:
        return int(seen[-1])
    batch = getattr(training, "global_batch_size", -1)
    return step * batch * training.seq_len if batch > 0 else None
