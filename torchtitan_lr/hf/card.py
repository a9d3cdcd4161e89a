# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The README.md of an export."""

import html
import re
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from torchtitan_lr.errors import escaped
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import SUFFIX
from torchtitan_lr.titan.base import drop_marker
from torchtitan_lr.training import history
from torchtitan_lr.training.loading import read_record

CARD = "README.md"

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

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{code})
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""


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
        kind=_FAMILIES[args.family],
        origin=origin,
        table="\n".join(f"| {key} | {_plain(value)} |" for key, value in rows.items()),
        code=", trust_remote_code=True" if coded else "",
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
        validated = record.get(history.VALIDATION_LOSS)
        for what, loss in (("training", history.train_loss(record)), ("validation", validated)):
            if loss is not None:
                text = f"{loss:.4f} nats per token, perplexity {history.perplexity(loss):.2f}"
                rows[f"{what} loss"] = f"{text}, at step {record['step']}"
    return rows
