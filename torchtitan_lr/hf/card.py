# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The README.md of an export, and the note of an import on where its weights come from."""

import html
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any, Literal

from huggingface_hub import ModelCard, ModelCardData

from torchtitan_lr.config.files import read_json, read_regular
from torchtitan_lr.errors import escaped
from torchtitan_lr.hf.export import write_json
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import SUFFIX
from torchtitan_lr.titan.base import drop_marker
from torchtitan_lr.training import history
from torchtitan_lr.training.loading import read_record

CARD = "README.md"

ORIGIN = "origin.json"
"""Beside an import's checkpoint: the weights' name on the Hub, and their licence as a model card
names it; texts are empty where they are unknown."""

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


def write_origin(folder: Path, repository: str, out: Path) -> None:
    """Note where an import comes from, with the licence of the folder's model card."""
    licence = None
    with suppress(Exception):  # no card, or one that is no YAML
        card = ModelCard(read_regular(folder / CARD).decode())
        licence = card.data.to_dict().get("license")
    licence = licence if isinstance(licence, str) else ""
    write_json(out / ORIGIN, {"repository": repository, "license": licence})


def _origin_of(step_dir: Path) -> dict[str, str] | None:
    """Return the origin of the weights that a checkpoint's run started from, or None for random."""
    # An imported checkpoint, of step 0, is its own origin.
    start: Any = str(step_dir)
    if not (step_dir.parent.parent / ORIGIN).is_file():
        section = read_record(step_dir).get("checkpoint")
        start = section.get("initial_load_path") if isinstance(section, dict) else None
    if not start or not isinstance(start, str):
        return None
    with suppress(OSError, ValueError, KeyError):
        found = read_json(Path(start).parent.parent / ORIGIN)
        return {key: str(found[key]) for key in ("repository", "license")}
    return {"repository": "", "license": ""}  # a step of another run; no place is told


def write_card(
    args: LlamaArgs, config: Any, step_dir: Path, out_dir: Path, kind: Kind, licence: str = ""
) -> None:
    """Write the model card of an export of a step; ``licence`` goes before its origin's."""
    step_dir = step_dir.resolve()
    step, flavor = step_dir.name.removeprefix("step-"), config.model.flavor
    name, origin = args.model_family.model_name, _origin_of(step_dir)
    other = "other weights"
    if origin is None:
        happened, origin = "pre-trained with torchtitan_lr", {"repository": "", "license": ""}
    elif step == "0":
        happened = f"the weights of {origin['repository'] or other}, not trained with torchtitan_lr"
    else:
        happened = f"fine-tuned from {origin['repository'] or other} with torchtitan_lr"
    data = ModelCardData(
        library_name="torchtitan_lr" if kind == "factored" else "transformers",
        pipeline_tag="text-generation",
        tags=["torchtitan_lr", name],
        license=licence or origin["license"] or None,
        base_model=origin["repository"] or None,
    )
    rows = {name: value for name, value in drop_marker(asdict(args)).items() if value is not None}
    if step != "0":
        rows |= _run_rows(config, step_dir, step)
    text = _TEXT.format(
        name=name if flavor.endswith(SUFFIX) else f"{name} {_plain(flavor)}",
        step=_plain(step),
        kind=_FAMILIES.get(args.family, f"model of the family {args.family}"),
        origin=_plain(happened),
        table="\n".join(f"| {key} | {_plain(value)} |" for key, value in rows.items()),
        loading=_LOADING[kind],
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{text}").save(out_dir / CARD)


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
        losses = {"training": history.train_loss(record)}
        losses["validation"] = record.get(history.VALIDATION_LOSS)
        for what, loss in losses.items():
            if loss is not None:
                text = f"{loss:.4f} nats per token, perplexity {history.perplexity(loss):.2f}"
                rows[f"{what} loss"] = f"{text}, at step {record['step']}"
    return rows
