# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Train small models with lanes at several shared fractions (CAAT-Net, Figure 3, Table 2).

Every run is one process: lanes are a dimension of its activations. The model reads the embedded
corpus byte by byte, so losses are nats per byte; all runs use the same batches. There are three
comparisons: the shared fraction p at 4 and 8 lanes; 8 lanes against ranks that mask their terms by
size (top-k) or at random; backward sums over the lanes in fp32 against bf16, in bf16 training.
Finished runs are reused, so the script can be restarted at any time.

    python -m scripts.research.caat_sweep --out outputs/caat_sweep/caat_sweep.png
"""

import argparse
import json
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torchtitan_lr.commands.parser import OneLineParser
from torchtitan_lr.console.figures import TITLE, finish, new_figure
from torchtitan_lr.scaling.pictures import colors_of

FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0)
LANES = (4, 8)
GROUPS = ("lanes", "masks", "sums")
LEARNING_RATE, WARMUP, LAST = 3e-3, 0.1, 0.1  # of the steps; of the rate
WEIGHT_DECAY, MAX_NORM = 0.01, 0.5
BATCH, TOKENS, VALIDATION_BATCHES = 16, 64, 32

Kind = Literal["full", "top-k", "random"]


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        kind: The family, with lanes; or `llama_full` with ranks that mask their terms.
        lanes: Lanes, or masking ranks; 1 for the ordinary model.
        fraction: Share p of the channels that are shared, or of the entries that are sent.
        dtype: Dtype of the computation; weights are fp32.
        backward_sum: As in ``[caat]``.
        seed: Seed of the weights.
    """

    kind: Kind = "full"
    lanes: int = 1
    fraction: float = 1.0
    dtype: str = "float32"
    backward_sum: Literal["float32", "activation"] = "float32"
    seed: int = 0

    @property
    def name(self) -> str:
        """Return the name of its file."""
        return "-".join(str(value) for value in asdict(self).values())


ORDINARY = Run()
"""p = 1 is exactly the model without lanes, so it is trained once for all tables."""


def lanes_run(lanes: int, fraction: float) -> Run:
    """Return a run of Figure 3."""
    return Run("full", lanes, fraction) if fraction < 1 else ORDINARY


def runs_of(group: str, fractions: list[float], lanes: list[int]) -> list[Run]:
    """Return the runs of a comparison; comparisons may share runs."""
    most = max(lanes)
    below = [p for p in fractions if p < 1]
    kinds: tuple[Kind, ...] = ("top-k", "random")
    if group == "lanes":
        return [Run(seed=1), *(lanes_run(n, p) for n in lanes for p in fractions)]
    if group == "masks":
        masked = [Run(kind, most, p) for kind in kinds for p in below if p > 0]
        return [*(lanes_run(most, p) for p in fractions if p > 0), *masked]
    halves: tuple[Literal["float32", "activation"], ...] = ("float32", "activation")
    return [Run("full", most, p, "bfloat16", total) for p in (1.0, 0.5) for total in halves]


def build_model(run: Run) -> Any:
    """Build the run's model on the CPU."""
    from scripts.research.activation_masks import mask_reductions
    from torchtitan_lr.models.args import LlamaArgs
    from torchtitan_lr.models.llama import LlamaModel

    masked = run.kind in ("top-k", "random")
    args = LlamaArgs(
        family="full",
        dim=64,
        n_layers=4,
        n_heads=8,
        ffn_dim=176,
        vocab_size=256,
        max_seq_len=TOKENS,
        rank_attention=0,
        rank_ffn=0,
        activation="fullrank",
        init_seed=run.seed,
        lanes=1 if masked else run.lanes,
        sync_fraction=1.0 if masked else run.fraction,
        backward_sum=run.backward_sum,
    )
    model = LlamaModel(args)
    model.init_weights()
    if run.kind in ("top-k", "random"):
        mask_reductions(model, run.lanes, run.kind, run.fraction)
    return model


def train(run: Run, steps: int, work: str) -> dict[str, Any]:
    """Train, or read a finished run's file.

    Args:
        run: The run.
        steps: Optimizer steps.
        work: Folder of the files.

    Returns:
        ``losses`` (one per step) and ``validation_loss``, nats per byte.
    """
    import torch

    path = Path(work) / f"{run.name}-{steps}.json"
    if path.exists():
        finished: dict[str, Any] = json.loads(path.read_text())
        return finished
    torch.set_num_threads(1)
    torch.manual_seed(0)  # for random masks
    model, texts = build_model(run), [read_bytes(split) for split in ("train", "validation")]
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate, steps))
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        loss = loss_on(model, run, draw_batch(texts[0], generator))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    held_out = torch.Generator().manual_seed(1)
    with torch.no_grad():
        validation = [
            loss_on(model, run, draw_batch(texts[1], held_out)).item()
            for _ in range(VALIDATION_BATCHES)
        ]
    result = asdict(run) | {"losses": losses, "validation_loss": sum(validation) / len(validation)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    return result


def loss_on(model: Any, run: Run, batch: Any) -> Any:
    """Return the mean loss of a batch (b, s + 1), computed in the run's dtype."""
    import torch

    dtype = getattr(torch, run.dtype)
    weights = {name: p.to(dtype) for name, p in model.named_parameters()}
    logits = torch.func.functional_call(model, weights, (batch[:, :-1],))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def read_bytes(split: Literal["train", "validation"]) -> Any:
    """Read the embedded corpus as one tensor of bytes."""
    import torch

    from torchtitan_lr.data.sources import Reader, Source

    text = "\n".join(Reader(Source("python_stdlib")).texts(held_out=split == "validation"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def draw_batch(text: Any, generator: Any) -> Any:
    """Cut random pieces (b, s + 1) out of a text."""
    import torch

    starts = torch.randint(len(text) - TOKENS, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(TOKENS + 1)].long()


def rate(steps: int, step: int) -> float:
    """Return the learning-rate factor: linear warm-up, then a cosine to a tenth."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * done))


def tables(results: dict[Run, dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the comparisons: a dictionary per row with ``table``, ``p`` and the losses."""
    loss = {run: result["validation_loss"] for run, result in results.items()}
    most, rows = max(options.lanes), []
    for p in options.fractions:
        columns = {f"{n} lanes": lanes_run(n, p) for n in options.lanes}
        rows.append({"table": "lanes", "p": p} | columns)
    for p in (p for p in options.fractions if p > 0):
        kinds: tuple[Kind, ...] = ("top-k", "random")
        masks = {kind: Run(kind, most, p) if p < 1 else ORDINARY for kind in kinds}
        rows.append({"table": "masks", "p": p, "CAAT-Net": lanes_run(most, p)} | masks)
    for p in (1.0, 0.5):
        runs = {"fp32": Run("full", most, p, "bfloat16")}
        runs["bf16"] = Run("full", most, p, "bfloat16", "activation")
        rows.append({"table": "sums", "p": p} | runs)
    rows.append({"table": "lanes", "p": 1.0, "another seed": Run(seed=1)})
    return [
        {key: loss[value] if isinstance(value, Run) else value for key, value in row.items()}
        for row in rows
        if row["table"] in options.groups
    ]


def as_text(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, with validation losses in nats per byte."""
    lines = []
    for row in rows:
        cells = [f"{k} {v:.4f}" for k, v in row.items() if k not in ("table", "p")]
        lines.append(f"{row['table']:8}p = {row['p']:<6}  " + "   ".join(cells))
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw loss over p, by number of lanes and in comparison with masks."""
    figure = new_figure()
    names = {name for row in rows for name in row.keys() - {"table", "p"}}
    colors = colors_of(sorted(names))
    titles = {"lanes": "CAAT-Net", "masks": "against masks on as many ranks"}
    shown = [table for table in titles if any(row["table"] == table for row in rows)]
    panels = figure.subplots(1, max(1, len(shown)), squeeze=False)[0]
    for axes, table in zip(panels, shown, strict=False):
        points: dict[str, list[tuple[float, float]]] = {}
        for row in (row for row in rows if row["table"] == table):
            for name in row.keys() - {"table", "p"}:
                points.setdefault(name, []).append((row["p"], row[name]))
        for name in sorted(points):
            style: dict[str, Any] = {"color": colors[name], "label": name, "ms": 4}
            marker = "x" if len(points[name]) == 1 else "o-"
            axes.plot(*zip(*sorted(points[name]), strict=True), marker, lw=1.2, **style)
        axes.set_title(titles[table], fontsize=TITLE)
        axes.set_xlabel("shared (sent) fraction p")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss (nats per byte)")
    finish(figure, path)


def main(argv: list[str] | None = None) -> int:
    """Train the missing runs, report and draw; return the exit status."""
    options = _parse(argv)
    wanted = [runs_of(group, options.fractions, options.lanes) for group in options.groups]
    runs = list(dict.fromkeys(run for group in wanted for run in group))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        job = partial(train, steps=options.steps, work=options.work)
        results = dict(zip(runs, pool.map(job, runs), strict=True))
    rows = tables(results, options)
    report = {"steps": options.steps, "rows": rows}
    (Path(options.work) / "report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1) if options.json else as_text(rows))
    if options.out and {"lanes", "masks"} & set(options.groups):
        draw(rows, Path(options.out))
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps per run")
    parser.add_argument("--workers", type=int, default=2, help="processes with one thread each")
    parser.add_argument("--fractions", default=",".join(map(str, FRACTIONS)), help="p, with commas")
    parser.add_argument("--lanes", default=",".join(map(str, LANES)), help="of 2, 4 and 8")
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"some of {', '.join(GROUPS)}")
    parser.add_argument("--work", default="outputs/caat_sweep", help="folder of the runs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", default="outputs/caat_sweep/caat_sweep.png", help="the PNG, or ''")
    options = parser.parse_args(argv)
    for name, least in (("steps", 1), ("workers", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: got {getattr(options, name)}, expected a positive integer")
    options.groups = options.groups.split(",")
    if unknown := [group for group in options.groups if group not in GROUPS]:
        parser.error(f"--groups: got {unknown[0]!r}, expected some of {', '.join(GROUPS)}")
    try:
        options.fractions = [float(item) for item in options.fractions.split(",")]
        ok = all(0 <= p <= 1 for p in options.fractions)
    except ValueError:
        ok = False
    if not ok:
        parser.error(f"--fractions: got {options.fractions!r}, expected numbers from 0 to 1")
    options.lanes = options.lanes.split(",")
    if any(item not in ("2", "4", "8") for item in options.lanes):
        parser.error(f"--lanes: got {','.join(options.lanes)!r}, expected some of 2, 4 and 8")
    options.lanes = [int(item) for item in options.lanes]
    return options


if __name__ == "__main__":
    sys.exit(main())
