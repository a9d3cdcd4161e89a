# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The README.md of an export: what the model is, what it was trained on, and how well it does."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

import tomli_w
from huggingface_hub import ModelCard, ModelCardData

from torchtitan_lr.checkpoints.run_record import CHANGES, described
from torchtitan_lr.config.build import build_job_config, config_class, without_code
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.parse import CONFIG_DIR
from torchtitan_lr.config.schema import Experimental
from torchtitan_lr.data.prepare import StoredPart, stored_corpora
from torchtitan_lr.data.template import template_files
from torchtitan_lr.data.tokenizer import ASSETS, HUB, TOKENIZER_CONFIG
from torchtitan_lr.errors import ConfigError, escaped
from torchtitan_lr.hf.loading import named_step, read_record
from torchtitan_lr.hf.origin import Origin, origin_of
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import SUFFIX, write_model_args
from torchtitan_lr.training import history
from torchtitan_lr.training.history import VALIDATION_LOSS, train_loss

CARD = "README.md"

_ARGS = "train_args.json"
"""The model's shape beside the TOML, where the run read its shape from a file."""

# A path that begins at a root, at a home or above the working directory, up to the next blank.
_PLACE = re.compile(r"""(?<![^\s,;=("'])(?:/|~|\.\./|[A-Za-z]:[\\/]|\\\\|file:)[^\s,;)"']+""")

_KINDS = {
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

{use}{repeat}
"""

_TRANSFORMERS = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{more})
tokenizer = AutoTokenizer.from_pretrained("."{more})
```"""

_FACTORED = """```bash
torchtitan-lr generate . --prompt "Once upon a time"{module}
```"""

_MODULE = " --experimental.custom_import=MODULE"
"""Follows the commands of a model whose family or plan is in a module of its author."""

_REPEAT = """ `{command}` in this folder {repeats}: {toml} holds every value of the
run that is not a default. Of paths outside of the run {toml} holds the last part."""

_FROM_START = """ Name the weights that the run
started from by `--checkpoint.initial_load_path=FOLDER/checkpoint/step-0`; without it training
starts from random ones."""


REPEAT_TOML = "repeat.toml"
"""The run's settings in an export; an import's ``train.toml`` starts from the weights instead."""


@dataclass(frozen=True)
class Exported:
    """What the card says of the export itself.

    Attributes:
        out_dir: The export; the card is its last file.
        written: Number of exported parameters.
        format: ``hf``, ``coded`` for ``hf`` with the model's code, or ``factored``.
        licence: The licence of the weights, such as ``apache-2.0``; "" for that of their origin.
    """

    out_dir: Path
    written: int
    format: Literal["hf", "coded", "factored"]
    licence: str = ""


def write_card(args: LlamaArgs, config: Any, step_dir: Path, exported: Exported) -> None:
    """Write the model card and, of a trained model, the TOML of its run.

    Args:
        args: The model's arguments.
        config: The run's record, sections as attributes.
        step_dir: The exported checkpoint.
        exported: The export.
    """
    out_dir, written = exported.out_dir, exported.written
    step_dir = named_step(step_dir)
    step = step_dir.name.removeprefix("step-")
    name, flavor = args.model_family.model_name, config.model.flavor
    of_file = flavor.endswith(SUFFIX)  # an imported model's
    name += f", {written:,} parameters" if of_file else f" {flavor}"
    record = read_record(step_dir)
    module = _MODULE if _has_module(record) else ""
    more = ", trust_remote_code=True" if exported.format == "coded" else ""
    loading = _TRANSFORMERS.format(more=more)
    if exported.format == "factored":
        loading = _FACTORED.format(module=module)
    origin = origin_of(step_dir)
    corpora = [] if step == "0" else _corpora(record)
    changes = _changes(record, step)
    rows = _model_rows(args, written) + _run_rows(config, corpora, step_dir, step)
    rows += [(f"changed after step {after}", text) for after, text in changes]
    repeat = ""
    if step != "0":
        repeat = _repeat(_ranks(step_dir.parent.parent), module, bool(changes), origin)
        (out_dir / REPEAT_TOML).write_text(run_toml(step_dir, published=True))
        if of_file:
            write_model_args(args, out_dir / _ARGS)
    data = ModelCardData(
        library_name="torchtitan_lr" if exported.format == "factored" else "transformers",
        pipeline_tag="text-generation",
        tags=["torchtitan_lr", args.model_family.model_name],
        license=exported.licence or (origin.license if origin else "") or None,
        base_model=(origin.repository if origin else "") or None,
    )
    text = _TEXT.format(
        name=_plain(name),
        step=_plain(step),
        kind=_KINDS.get(args.family, f"model of the family {args.family}"),
        origin=_plain(_what_happened(step, origin, corpora)),
        table="\n".join(f"| {key} | {_plain(value)} |" for key, value in rows),
        loading=loading,
        use=_use(corpora, out_dir),
        repeat=repeat,
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n{text}").save(out_dir / CARD)


def _repeat(ranks: int | None, module: str, changed: bool, origin: Origin | None) -> str:
    """Say how to repeat the training."""
    command = f"{f'NGPU={ranks} ' if ranks else ''}torchtitan-lr train {REPEAT_TOML}{module}"
    repeats = "repeats its training" + (", without the changes" if changed else "")
    text = _REPEAT.format(command=command, toml=REPEAT_TOML, repeats=repeats)
    return text + (_FROM_START if origin else "")


def _has_module(record: dict[str, Any]) -> bool:
    """Whether the run had a module of its author: a family, a plan or a codec."""
    section = record.get("experimental")
    named = section.get("custom_import") if isinstance(section, dict) else None
    return bool(named) and named != Experimental.custom_import


def _what_happened(step: str, origin: Origin | None, corpora: Sequence[StoredPart]) -> str:
    """Say in words how the weights came to be."""
    if step == "0":
        if origin is None:
            return "initial or imported weights, not trained with torchtitan_lr"
        return f"the weights of {origin.name}, not trained with torchtitan_lr"
    names = " and ".join(part.name for part, _ in corpora)
    on = f" on {names}" if names else ""
    if origin is None:
        return f"pre-trained{on} with torchtitan_lr"
    return f"fine-tuned from {origin.name or 'other weights'}{on} with torchtitan_lr"


def _use(corpora: Sequence[StoredPart], out_dir: Path) -> str:
    """Say what the model is for; a template alone may belong to the tokenizer's own model."""
    of_pairs = any(corpus is not None and corpus.kind == "pairs" for _, corpus in corpora)
    path = out_dir / TOKENIZER_CONFIG
    has_template = template_files(out_dir) or (
        path.is_file() and "chat_template" in read_json(path)
    )
    if of_pairs and has_template:
        return "A chat model: it answers messages in the format of its chat template."
    if of_pairs:
        return "An instruction model: it answers prompts like those of its training."
    if not corpora and has_template:
        return "Its tokenizer has a chat template."
    return "A base model: it continues text."


def _corpora(record: dict[str, Any]) -> list[StoredPart]:
    """Return the corpora of a run, as far as its record names any."""
    try:
        return stored_corpora(build_job_config([], record))
    except ConfigError:
        return []


def _changes(record: dict[str, Any], step: str) -> list[tuple[int, str]]:
    """Return what was changed when the run was resumed, up to the exported step."""
    found = []
    listed = record.get(CHANGES)
    for entry in listed if isinstance(listed, list) else []:
        try:
            after, keys = entry["after_step"], {k: v for k, v in entry.items() if k != "after_step"}
            if after < int(step):
                found.append((after, described(keys)))
        except (TypeError, ValueError, KeyError):  # a damaged record may hold anything
            continue
    return found


def run_toml(step_dir: Path, published: bool = False) -> str:
    """Return the TOML that repeats a run: its model, and what is no default in its record.

    It names no module of the run.

    Args:
        step_dir: A checkpoint of the run.
        published: Whether it goes into an export, with the run's tokenizer and shape beside it: of
            other places of the training machine it then has the last part of their paths.
    """
    defaults = config_class()().to_dict()
    record = without_code(build_job_config([], read_record(step_dir)).to_dict())
    changed = _changed(record, defaults)
    changed.get("job", {}).pop("config_file", None)
    # Values that defaults of a later version must not replace.
    model, schedule = changed.setdefault("model", {}), changed.setdefault("lr_scheduler", {})
    for key in ("name", "flavor", "hf_assets_path"):
        model[key] = record["model"][key]
    for key in ("warmup_ratio", "warmup_steps"):
        schedule[key] = record["lr_scheduler"][key]
    if schedule["warmup_ratio"] >= 0:
        del schedule["warmup_steps"]  # it follows the steps
    if published:
        changed.get("job", {}).pop("dump_folder", None)
        changed.get("checkpoint", {}).pop("initial_load_path", None)  # weights of another place
        changed.get("training", {}).pop("token_folder", None)  # this machine's cache
        if not record["model"]["hf_assets_path"].startswith((HUB, ASSETS)):
            model["hf_assets_path"] = CONFIG_DIR
        if str(model.get("flavor")).endswith(SUFFIX):
            model["flavor"] = f"{CONFIG_DIR}/{_ARGS}"
        changed = _without_places(changed)
    return tomli_w.dumps({name: keys for name, keys in changed.items() if keys})


def _without_places(value: Any) -> Any:
    """Shorten the paths in the values of a table that lead to a place of one machine."""
    if isinstance(value, dict):
        return {key: _without_places(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_places(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if _PLACE.match(value):  # a name in the path may have blanks
        return _last_part(value)
    return _PLACE.sub(lambda found: _last_part(found[0]), value)


def _last_part(path: str) -> str:
    return PurePath(path.replace("\\", "/")).name


def _plain(value: Any) -> str:
    """Return a text as Markdown shows it: no HTML, no link, no picture and no other cell."""
    text = html.escape(escaped(str(_without_places(value))), quote=False)
    return re.sub(r"[\\`*\[\]|~]", r"\\\g<0>", text)


def _ranks(dump: Path) -> int | None:
    """Return a run's number of ranks: its speed, all ranks together, over the speed of one."""
    whole, one = history.TOKENS_PER_S, history.TOKENS_PER_S_PER_DEVICE
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


def _run_rows(
    config: Any, corpora: Sequence[StoredPart], step_dir: Path, step: str
) -> list[tuple[str, Any]]:
    """Return rows from the prepared corpora, the record and the history of the run."""
    training = config.training
    records = history.read_history(step_dir.parent.parent / history.HISTORY_FILE)
    rows: list[tuple[str, Any]] = []
    for part, corpus in corpora:
        text = " ".join(
            [part.name, *(f"({_without_places(path)})" for path in part.sources[0].paths)]
        )
        if len(corpora) > 1:
            text += f", {part.weight:.0%} of the sequences"
        if corpus is not None:
            documents = sum(shard.documents for shard in corpus.train)
            what = "pairs or chats" if corpus.kind == "pairs" else "documents"
            text += f", {documents:,} {what}, {corpus.tokens():,} tokens"
        rows.append(("data", text))
    rows.append(("steps", step))
    if not step.isdecimal():
        return rows
    past = [record for record in records if record["step"] <= int(step)]
    tokens = _tokens(training, past, int(step))
    if tokens is not None:
        rows.append(("tokens", f"{tokens:,}"))
    losses = {
        "training": [(train_loss(record), record["step"]) for record in past],
        "validation": [(record.get(VALIDATION_LOSS), record["step"]) for record in past],
    }
    for what, pairs in losses.items():
        found = [(loss, at) for loss, at in pairs if loss is not None]
        if found:
            loss, at = found[-1]
            text = f"{loss:.4f} nats per token, perplexity {history.perplexity(loss):.2f}"
            rows.append((f"{what} loss at step {at}", text))
    return rows


def _tokens(training: Any, past: list[dict[str, Any]], step: int) -> int | None:
    """Tokens seen up to a step: the history's number, else batch times length where known."""
    key = history.TOKENS_SEEN
    seen = [r[key] for r in past if r["step"] == step and key in r]
    if seen:
        return int(seen[-1])
    batch = getattr(training, "global_batch_size", -1)
    return step * batch * training.seq_len if batch > 0 else None
