# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Measure effective ranks of a checkpoint's activations; format them as a table and a figure."""

import argparse
import sys
from pathlib import Path
from typing import Any

from torchtitan_lr.console.figures import TITLE, finish, new_figure
from torchtitan_lr.console.tables import text_table
from torchtitan_lr.errors import ConfigError


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Load the model, run it, and return one row per activation.

    Raises:
        ConfigError: An input cannot be read or used.
    """
    from scripts.research.effective_rank import activation_spectra, effective_rank
    from torchtitan_lr.hf.loading import build_model_args, load_model, read_run_config

    config = read_run_config(options.checkpoint, options.config)
    args = build_model_args(config)
    seq_len = min(options.seq_len or config.training.seq_len, args.max_seq_len)
    tokens = read_tokens(config, options, seq_len)
    model = load_model(options.checkpoint, args, config.model.hf_assets_path)
    try:
        model = model.to(options.device)
        tokens = tokens.to(options.device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("--device", options.device, "a device such as cpu") from error
    rows: list[dict[str, Any]] = []
    for spectrum in activation_spectra(model, tokens):
        ranks = {f"{a:g}": effective_rank(spectrum.energies, a) for a in options.alpha}
        names = {"block": spectrum.block, "projection": spectrum.projection}
        rows.append({**names, "what": spectrum.what, "width": spectrum.width, "rank": ranks})
    widest = max(row["width"] for row in rows)
    if tokens.numel() < widest:
        note = f"note: every rank is at most the {tokens.numel()} tokens; use at least {widest}"
        print(note, file=sys.stderr)
    return rows


def read_tokens(config: Any, options: argparse.Namespace, seq_len: int) -> Any:
    """Return (b, s) tokens of held-out text, b·s at least ``--tokens`` if the text is long enough.

    Raises:
        ConfigError: There is no text, or it is shorter than one sequence.
    """
    import torch

    from torchtitan_lr.data.corpus import Corpus
    from torchtitan_lr.data.prepare import ensure_prepared
    from torchtitan_lr.data.tokenizer import build_tokenizer
    from torchtitan_lr.hf.loading import read_job_config
    from torchtitan_lr.hf.text import prepared

    tokenizer: Any = build_tokenizer(config)
    documents: Any
    if options.text is None:
        run = read_job_config(options.checkpoint, options.config)
        corpora = [Corpus.open(part.folder) for part in ensure_prepared(run, "validation")]
        documents = (document.tokens.tolist() for document in prepared(corpora, tokenizer))
    else:
        text = options.text.read_text(errors="replace")
        documents = [tokenizer.encode(text, add_bos=True, add_eos=True)]
    found: list[int] = []
    for document in documents:
        found += document
        if len(found) >= options.tokens + seq_len:
            break
    rows = min(-(-options.tokens // seq_len), len(found) // seq_len)
    if rows == 0:
        raise ConfigError("--text", str(options.text), f"text of at least {seq_len} tokens")
    return torch.tensor(found[: rows * seq_len]).view(rows, seq_len)


def as_text(rows: list[dict[str, Any]], alphas: list[float]) -> str:
    """Format the rows as a table."""
    lines = [
        [
            *(str(row["block"]), row["projection"], row["what"], str(row["width"])),
            *(
                f"{row['rank'][f'{a:g}']} ({row['rank'][f'{a:g}'] / row['width']:.2f})"
                for a in alphas
            ),
        ]
        for row in rows
    ]
    header = ["block", "projection", "what", "width", *(f"r({a:g})" for a in alphas)]
    return text_table(header, lines, left=3)


def draw(rows: list[dict[str, Any]], alphas: list[float], path: Path) -> None:
    """Draw r(alpha)/width over blocks: a line per projection, a panel per alpha and kind."""
    kinds = [kind for kind in ("output", "latent") if any(row["what"] == kind for row in rows)]
    figure = new_figure(4.2 * len(alphas) + 1.3, 3.4 * len(kinds))
    panels = figure.subplots(len(kinds), len(alphas), squeeze=False, sharex=True, sharey=True)
    names = list(dict.fromkeys(row["projection"] for row in rows))
    for line, kind in zip(panels, kinds, strict=True):
        for axes, alpha in zip(line, alphas, strict=True):
            for i, name in enumerate(names):
                mine = [r for r in rows if r["projection"] == name and r["what"] == kind]
                shares = [r["rank"][f"{alpha:g}"] / r["width"] for r in mine]
                style = {"color": f"C{i}", "marker": "o", "markersize": 3, "linewidth": 1}
                axes.plot([r["block"] for r in mine], shares, label=name, **style)
            axes.set_title(f"{kind}, α = {alpha:g}", fontsize=TITLE)
            axes.grid(alpha=0.3)
            axes.set_ylim(0, 1.02)
            axes.xaxis.get_major_locator().set_params(integer=True)
        line[0].set_ylabel("r(α) / width")
    for axes in panels[-1]:
        axes.set_xlabel("block")
    finish(figure, path)
