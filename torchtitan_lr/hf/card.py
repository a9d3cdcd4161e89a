# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The README.md of an export: what the model is, what it was trained on, and how well it does."""

import html
import re
from pathlib import Path, PurePath
from typing import Any, Literal

from huggingface_hub import ModelCard, ModelCardData

from torchtitan_lr.errors import escaped
from torchtitan_lr.hf.origin import Origin, origin_of
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import SUFFIX
from torchtitan_lr.training import history
from torchtitan_lr.training.history import VALIDATION_LOSS, train_loss

CARD = "README.md"

Kind = Literal["llama", "coded", "factored"]
"""A LLaMA of transformers', a model with its code, or weights with this package's names."""

_FAMILIES = {
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

{loading}
"""

_TRANSFORMERS = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{more})
tokenizer = AutoTokenizer.from_pretrained(".")
```"""

_LOADING: dict[Kind, str] = {
    "llama": _TRANSFORMERS.format(more=""),
    "coded": _TRANSFORMERS.format(more=", trust_remote_code=True"),
    "factored": "`torchtitan-lr evaluate` and `torchtitan-lr import` read this folder.",
}


def write_card(
    args: LlamaArgs, config: Any, step_dir: Path, out_dir: Path, kind: Kind, licence: str = ""
) -> None:
    """Write the model card of an export.

    Args:
        args: The model's arguments.
        config: The JobConfig of the run.
        step_dir: The exported checkpoint.
        out_dir: The export.
        kind: What it is.
        licence: The licence of the weights, such as ``apache-2.0``; "" for that of their origin.
    """
    step_dir = step_dir.resolve()
    step, flavor = step_dir.name.removeprefix("step-"), config.model.flavor
    origin, name = origin_of(step_dir), args.model_family.model_name
    rows = _model_rows(args)
    if step != "0":
        rows += _run_rows(config, step_dir, step)
    data = ModelCardData(
        library_name="torchtitan_lr" if kind == "factored" else "transformers",
        pipeline_tag="text-generation",
        tags=["torchtitan_lr", name],
        license=licence or (origin.license if origin else "") or None,
        base_model=(origin.repository if origin else "") or None,
    )
    text = _TEXT.format(
        name=name if flavor.endswith(SUFFIX) else f"{name} {_plain(flavor)}",
        step=_plain(step),
        kind=_FAMILIES.get(args.family, f"model of the family {args.family}"),
        origin=_plain(_what_happened(step, origin)),
        table="\n".join(f"| {key} | {_plain(value)} |" for key, value in rows),
        loading=_LOADING[kind],
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{text}").save(out_dir / CARD)


def _what_happened(step: str, origin: Origin | None) -> str:
    """Say in words how the weights came to be."""
    if step == "0":
        name = origin.name if origin else "initial values"
        return f"the weights of {name}, not trained with torchtitan_lr"
    if origin is None:
        return "pre-trained with torchtitan_lr"
    return f"fine-tuned from {origin.name or 'other weights'} with torchtitan_lr"


def _plain(value: Any) -> str:
    """Return a text as Markdown shows it: no HTML, no link, no picture and no other cell."""
    text = html.escape(escaped(str(value)), quote=False)
    return re.sub(r"[\\`*\[\]|~]", r"\\\g<0>", text)


def _model_rows(args: LlamaArgs) -> list[tuple[str, Any]]:
    heads = f"{args.dim}, {args.n_layers}, {args.n_heads} ({args.kv_heads})"
    rows: list[tuple[str, Any]] = [("width, blocks, heads (of keys)", heads)]
    rows += [("vocabulary", args.vocab_size), ("sequence length", args.max_seq_len)]
    if args.low_rank:
        rows.append(("ranks of attention, feed-forward", f"{args.rank_attention}, {args.rank_ffn}"))
        rows.append(("nonlinearity", args.activation))
    if args.model_family.gated:
        rows.append(("gate of the carried latents", args.lax_gate))
    if args.lanes > 1:
        rows.append(("CAAT-Net lanes, shared fraction", f"{args.lanes}, {args.sync_fraction:g}"))
    return rows


def _run_rows(config: Any, step_dir: Path, step: str) -> list[tuple[str, Any]]:
    """Return rows from the run's configuration and history, up to the step."""
    rows: list[tuple[str, Any]] = [("data", _corpora(config.training))]
    records = history.read_history(step_dir.parent.parent / history.HISTORY_FILE)
    past = [record for record in records if step.isdecimal() and record["step"] <= int(step)]
    seen = [r[history.TOKENS_SEEN] for r in past if history.TOKENS_SEEN in r]
    rows += [("tokens", f"{seen[-1]:,}")] if seen else []
    losses = {
        "training": [(train_loss(record), record["step"]) for record in past],
        "validation": [(record.get(VALIDATION_LOSS), record["step"]) for record in past],
    }
    for what, pairs in losses.items():
        found = [(loss, at) for loss, at in pairs if loss is not None]
        for loss, at in found[-1:]:
            text = f"{loss:.4f} nats per token, perplexity {history.perplexity(loss):.2f}"
            rows.append((f"{what} loss at step {at}", text))
    return rows


def _corpora(training: Any) -> str:
    """Name the corpora; of paths the last part, since the rest is the training machine's."""
    entries = [entry if isinstance(entry, dict) else vars(entry) for entry in training.mixture]
    entries = entries or [{"dataset": training.dataset, "path": training.dataset_path}]
    names = []
    for entry in entries:
        path = PurePath(str(entry.get("path") or "")).name
        names.append(f"{entry.get('dataset')} ({path})" if path else str(entry.get("dataset")))
    return ", ".join(names)
