#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Fine-tune with AdamW and with TSR-Adam, and write losses, scores and bytes in one table.

Both start from the same weights and read the same pairs in the same order. The table has the
loss on the answers of the held-out pairs, the exact match and F1 of greedy answers, and the bytes
that the ledger counts between the replicas, refreshes included. Finished runs are reused and an
interrupted run resumes from its last checkpoint.

    ./run_llama_train.sh
    python scripts/papers/finetune_table.py --out docs/results/finetuning.md
"""

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from torchtitan_lr.formulas.papers.published import TSR_TABLE_4

from torchtitan_lr.commands.parser import OneLineParser, in_one_line
from torchtitan_lr.console.tables import markdown_table

_NAME = "scripts/papers/finetune_table.py"
SENT = "comm_bytes/dp_replicate"
METHODS = {
    "AdamW": ["--optimizer.name=AdamW"],
    "TSR-Adam": ["--optimizer.name=TSRAdam"],
}
HEADER = ("", "loss, nats per token", "exact match", "F1", "bytes per step", "bytes, all steps")


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Train the missing runs, score them, and write the page."""
    options = _parse(argv)
    # Imported late: --help needs no torch.
    from torchtitan_lr.config.build import build_job_config
    from torchtitan_lr.errors import ConfigError
    from torchtitan_lr.scaling.experiments import check_run

    given = [f"--job.config_file={options.config}", *options.overrides]
    start = build_job_config(given).checkpoint.initial_load_path
    if not start:
        raise ConfigError("checkpoint.initial_load_path", start, "the weights to fine-tune")
    first = check_run(given, ranks=options.ranks)
    rates = {"AdamW": options.adamw_lr, "TSR-Adam": first.optimizer.lr}
    results = {"before": _score(Path(start), first, options)}
    for method, lr in rates.items():
        folder = _train(options, method, lr, first.training.steps)
        step = folder / first.checkpoint.folder / f"step-{first.training.steps}"
        results[method] = _score(step, first, options) | _sent(folder) | {"lr": lr}
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        out = Path(options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(_page(options, first, results))
        print(_table(results))
    return 0


def _train(options: argparse.Namespace, method: str, lr: float, steps: int) -> Path:
    """Run the launcher, or find a finished run, and return its folder."""
    from torchtitan_lr.scaling.experiments import launch, step_records

    folder = Path(options.work) / method
    if len(step_records(folder)) < steps:
        arguments = [
            *options.overrides,
            *METHODS[method],
            f"--optimizer.lr={lr}",
            f"--checkpoint.interval={max(1, steps // 2)}",
            *("--metrics.log_freq=1", "--metrics.comm_ledger"),
        ]
        launch(options.config, folder, arguments, ranks=options.ranks)
    return folder


def _sent(folder: Path) -> dict[str, Any]:
    from torchtitan_lr.scaling.experiments import step_records

    sent = [int(record[SENT]) for record in step_records(folder)]
    return {"bytes_per_step": sum(sent) / len(sent), "bytes": sum(sent), "peak_bytes": max(sent)}


def _score(step: Path, config: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the loss and the scores of a checkpoint on the run's held-out pairs."""
    from scripts.research.answers import answer_pairs, scores
    from torchtitan_lr.data.corpora import validation_source
    from torchtitan_lr.data.pair_corpora import PairCorpus
    from torchtitan_lr.data.validation import build_validation_set
    from torchtitan_lr.errors import ConfigError
    from torchtitan_lr.hf.evaluate import total_loss
    from torchtitan_lr.hf.loading import load_for_inference

    corpus = validation_source(config).open()
    if not isinstance(corpus, PairCorpus):
        raise ConfigError("training.dataset", corpus.name, "a corpus of pairs")
    model, tokenizer = load_for_inference(step, device=options.device)
    loss, tokens = total_loss(model, build_validation_set(config, 1, 0, tokenizer))
    seq_len = config.validation.seq_len
    given = list(answer_pairs(model, tokenizer, corpus.records(), seq_len))
    found = scores(given)
    result = {"loss": loss / tokens, "exact": found.exact, "f1": found.f1, "pairs": found.pairs}
    return result | {"examples": [[answer.written, answer.given] for answer in given[:3]]}


def _table(results: dict[str, Any]) -> str:
    rows = []
    for name, found in results.items():
        row = [name, f"{found['loss']:.4f}", f"{found['exact']:.1%}", f"{found['f1']:.1%}"]
        sent = ["", ""]
        if "bytes" in found:
            sent = [f"{found['bytes_per_step'] / 1e6:.3f} MB", f"{found['bytes'] / 1e6:.1f} MB"]
        rows.append(row + sent)
    return markdown_table(HEADER, rows)


def _page(options: argparse.Namespace, config: Any, results: dict[str, Any]) -> str:
    """Return the page of the results, with the paper's numbers beside them."""
    from torchtitan_lr.scaling.machine import describe
    from torchtitan_lr.scaling.runner import current_commit

    adamw, tsr = results["AdamW"], results["TSR-Adam"]
    command = " ".join([f"--ranks={options.ranks}", *options.overrides])
    published = [[name, sent, f"{score}%"] for name, (sent, score) in TSR_TABLE_4.items()]
    here = describe()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    text = (
        f"`{options.config}`: {config.training.steps} steps from "
        f"`{config.checkpoint.initial_load_path}` on {options.ranks} replicas. Learning rates: "
        f"{adamw['lr']} with AdamW, {tsr['lr']} with TSR-Adam. Data: `{config.training.dataset}` "
        f"of Python {version}. The scores are of greedy answers to the {tsr['pairs']} held-out "
        f"pairs that fit {config.validation.seq_len} tokens: the same words but for case and "
        "punctuation, and the F1 of the words. Bytes are those of a rank between the replicas, as "
        f"the ledger counts them. One seed, commit {current_commit()}, {here['cpu']}, "
        f"{here['cores']} cores, torch {here['torch']}.",
        f"TSR-Adam sends {adamw['bytes'] / tsr['bytes']:.1f} times fewer bytes, refreshes "
        f"included; {adamw['peak_bytes'] / tsr['peak_bytes']:.1f} times fewer in its most "
        "expensive step.",
        "The paper's Table 4: RoBERTa-Base on GLUE, mean of eight tasks. Neither the model nor "
        "the tasks are ours, so that only the ratio of the bytes compares: 24.7 there.",
    )
    setting, ratio, paper = (textwrap.fill(part, 100) for part in text)
    command = f"```bash\n./run_llama_train.sh\n.venv/bin/python {_NAME} {command}\n```"
    titles = ("", "bytes per step", "mean score")
    parts = ("# Fine-tuning: AdamW and TSR-Adam", command, setting, _table(results))
    return "\n\n".join((*parts, ratio, paper, markdown_table(titles, published))) + "\n"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_first(
        "config",
        "--config",
        default="train_configs/debug_finetune.toml",
        help="the TOML file of the run with TSR-Adam",
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--adamw_lr", type=float, default=3e-3, help="learning rate of AdamW")
    parser.add_argument("--device", default="", help="where answers are generated")
    parser.add_argument("--work", default="outputs/finetune_table", help="folder of the runs")
    parser.add_argument("--out", default="docs/results/finetuning.md", help="the page")
    parser.add_argument("--json", action="store_true", help="print JSON and write no page")
    options = parser.parse_with_overrides(argv)
    parser.check_at_least(options, ranks=2)
    parser.check_toml(options.config, "CONFIG")
    if not options.adamw_lr > 0:
        parser.error(f"--adamw_lr: got {options.adamw_lr}, expected a positive number")
    return options


if __name__ == "__main__":
    sys.exit(main())
