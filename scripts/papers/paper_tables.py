#!/usr/bin/env python3
# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Write docs/paper_tables.md: the papers' printed numbers next to the formulas' results.

python scripts/papers/paper_tables.py          # writes the page
python scripts/papers/paper_tables.py --print  # shows it, writes nothing
python scripts/papers/paper_tables.py --check  # exit status 1 if the page would change
"""

import sys
from pathlib import Path
from typing import Any

from torchtitan_lr.compression.peeling import PEELING_LIMIT, union_density
from torchtitan_lr.compression.sizes import LEVELS
from torchtitan_lr.formulas.communication import block_traffic
from torchtitan_lr.formulas.compression import paper_bits
from torchtitan_lr.formulas.data_parallel import linear_volume
from torchtitan_lr.formulas.intensity import arithmetic_intensity, feed_forward_products
from torchtitan_lr.formulas.papers import published as paper
from torchtitan_lr.formulas.papers.caat import (
    block_payload,
    block_time,
    gpt_block_operations,
    hiding_fraction,
    speed_up,
)
from torchtitan_lr.formulas.parameters import count_parameters
from torchtitan_lr.formulas.plans.registry import FORMULAS
from torchtitan_lr.formulas.traffic import count
from torchtitan_lr.formulas.tsr import (
    TSRShape,
    published_adamw,
    published_galore_memory,
    published_tsr,
)
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.tensor.plans import TPSettings
from torchtitan_lr.tools.cli import OneLineParser, markdown_table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # scripts/ is a folder of programs, not a package

from scripts.papers.cola import (  # noqa: E402
    cola_flops,
    cola_memory,
    cola_training_flops,
    same,
)

PAGE = ROOT / "docs" / "paper_tables.md"

INTRODUCTION = """\
# The papers' tables

The papers' printed numbers that follow from formulas, next to the results of our formulas.
`python scripts/papers/paper_tables.py` writes this page. `tests/unit/formulas/test_paper_tables.py`
checks that it is up to date, and that numbers marked *equal* agree at the printed precision.
Losses, perplexities and most timings require the authors' training runs and are not included; the
last section has the commands for some timings."""


def boost_communication() -> str:
    """BOOST, equations 2 and 3, Table 6 and Figure 8."""
    shape: dict[str, Any] = {"dim": 4096, "n_heads": 32, "rank_attention": 1024, "rank_ffn": 1024}
    rows = []
    for alpha, against_full, against_btp in ((2.5, "5.0", "5.7"), (4.0, "6.5", "")):
        args = LlamaArgs(ffn_dim=int(alpha * 4096), **shape)
        volume = {plan: volume_of(args, plan) for plan in ("vanilla_replicated", "btp")}
        whole = LlamaArgs(family="full", **(shape | {"rank_attention": 0, "rank_ffn": 0}))
        dense = volume_of(whole, "megatron")
        vanilla = volume["vanilla_replicated"]
        less = vanilla / volume["btp"]
        cells = [same(against_full, vanilla / dense)]
        cells.append(same(against_btp, less) if against_btp else f"{less:.1f}, not printed")
        rows.append([f"d_ff = {alpha}d", *cells, same("1.14", dense / volume["btp"])])
    figure = []
    for plan, gib in paper.BOOST_VOLUME_GIB.items():
        args = FLAVORS["cola" if FORMULAS[plan].low_rank else "full"]["7B"]
        bytes_ = 2 * 4 * 4096 * volume_of(args, plan)
        figure.append([f"`{plan}`", f"{gib:.2f}", f"{bytes_ / 2**30:.3f}"])
    full, low = FLAVORS["full"]["7B"], FLAVORS["cola"]["7B"]
    ratio = linear_volume(full) / linear_volume(low)
    header = ["", "vanilla over full", "vanilla over BTP", "full over BTP"]
    return f"""## BOOST, equations 2 and 3, Table 6, Figure 8: communication

Elements per block and pass, without statistics: 2bsd at full rank, 5bsd + 2bs·d_ff vanilla (Eq. 2),
7bsr BTP (Eq. 3), at r = d/4. The text of section 4 prints 5 and 6.5, 5.7 and 1.14.

{markdown_table(header, rows)}

Figure 8 (left), 7B, b = 4, s = 4096, bf16, GiB per block and pass (read off the figure):

{markdown_table(["plan", "printed", "formula"], figure)}

Table 6, data parallelism: `linear_volume` is L(11dr + 3·d_ff·r) elements, not L(4d² + 3d·d_ff),
equal; 7B sends {ratio:.2f} times less (printed: about 2.5).

Differences from the paper:

- Table 6 counts backward like forward. This holds for BTP and full rank. Vanilla's backward is
{backward_note()}
- The published vanilla computes all heads on every rank (`vanilla_replicated`). The fair `vanilla`
  shards them and sends bsd more in forward.
- The paper omits the statistics of two norms, 2bs elements in fp32; `formulas/communication.py`
  includes them.
- Pipelines: 2pbsd counts d elements per token at a boundary. Under `btp` a rank sends d/T of them,
  and LaX also sends its seven latents (`formulas/pipeline.py`)."""


def volume_of(args: LlamaArgs, plan: str, pass_: str = "forward") -> int:
    """Return the elements sent per block and token in one pass, without statistics."""
    rows = block_traffic(args, TPSettings(plan), tokens=1)
    counted = [row for row in rows if row.role == "activation"]
    return count(counted, "forward" if pass_ == "forward" else "backward")[1]


def backward_note() -> str:
    """Return a sentence that compares vanilla's backward with its forward."""
    args = LlamaArgs(dim=1024, n_heads=16, ffn_dim=2560, rank_attention=256, rank_ffn=256)
    parts = []
    for grouping, name in ((True, "where q, k, v (and gate, up) share it"), (False, "otherwise")):
        rows = block_traffic(args, TPSettings("vanilla_replicated", grouping=grouping), tokens=1)
        forward, backward = (count(rows, p)[1] / 1024 for p in ("forward", "backward"))
        parts.append(f"{backward:g}bsd for {forward:g}bsd {name}")
    return f"  {parts[0]}, {parts[1]} (d_ff = 2.5d)."


def boost_intensity() -> str:
    """BOOST, Tables 7 and 8."""
    rows = []
    for batch in (1, 4):
        value = {
            plan: arithmetic_intensity(
                feed_forward_products(FLAVORS[family]["7B"], plan, 4, 4096 * batch)
            )
            for plan, family in (("megatron", "full"), ("vanilla", "cola"), ("btp", "cola"))
        }
        ratios = (value["vanilla"] / value["megatron"], value["btp"] / value["vanilla"])
        cells = [f"{value[plan]:.0f}" for plan in value] + [f"{ratio:.2f}" for ratio in ratios]
        rows.append([str(batch), *cells])
    header = ["b", "full", "vanilla", "BTP", "vanilla/full", "BTP/vanilla"]
    vanilla, btp = paper.BOOST_INTENSITY_7B.values()
    shapes = [
        [
            flavor,
            *(str(number) for number in numbers),
            "equal" if matches(flavor) else "**differs**",
        ]
        for flavor, numbers in paper.BOOST_SHAPES.items()
    ]
    return f"""## BOOST, Table 7: arithmetic intensity of the feed-forward

All printed formulas follow from the products of `formulas/intensity.py`. They count the up and the
down projection; the omitted gate of LLaMA has the intensity of the up projection. FLOPs per byte,
7B, T = 4, s = 4096, bf16. The paper's text prints {vanilla} and {btp} for the last two columns,
which corresponds to b = 1; the second is a little high.

{markdown_table(header, rows)}

## BOOST, Table 8: shapes

{markdown_table(["flavor", "layers", "heads", "d", "d_ff", "r", "here"], shapes)}"""


def boost_memory() -> str:
    """BOOST, Tables 4 and 5."""
    parameters = count_parameters(FLAVORS["cola"]["7B"])
    linears = parameters.attention + parameters.feed_forward
    one_table = 2 * (linears + parameters.head) / 4 / 2**30
    both = 2 * parameters.total / 4 / 2**30
    rows = [
        [part, printed, same(printed, one_table * (2 if part == "optimizer" else 1))]
        for part, printed in paper.BOOST_TABLE_4.items()
    ]
    cells, ratio = [], {}
    for (plan, batch), (saved, milliseconds, printed) in paper.BOOST_TABLE_5.items():
        ratio[plan, batch] = value = saved / milliseconds
        equal = same(printed, value).replace("**differs**", "not equal")
        cells.append([plan, str(batch), f"{saved:,}", str(milliseconds), printed, equal])
    times = [
        same(printed, ratio["BOOST", batch] / ratio["Vanilla", batch])
        for batch, printed in paper.BOOST_TABLE_5_TIMES.items()
    ]
    header = ["plan", "b", "MB saved", "ms more", "printed MB per ms", "quotient"]
    return f"""## BOOST, Tables 4 and 5: memory and checkpointing

CoLA 7B on T = 4 in pure bf16, two bytes per element and two moments; the "GB" are GiB. The printed
numbers match the linears plus one vocabulary table of 32,000 entries; with our two untied tables,
weights take {both:.2f}. "Act. + others", 30.73 and 22.14, is measured.

{markdown_table(["part", "printed", "one table"], rows)}

Table 5's memory and times are measured; its last column is their quotient. Vanilla's two quotients
are swapped in print. BOOST over vanilla: 1.70 printed, {times[0]} (b = 4); 1.56 printed,
{times[1]} (b = 8).

{markdown_table(header, cells)}"""


def matches(flavor: str) -> bool:
    """Return whether a flavor has the shape of BOOST's Table 8."""
    a = FLAVORS["cola"][flavor]
    ours = (a.n_layers, a.n_heads, a.dim, a.ffn_dim, a.rank_ffn)
    return ours == paper.BOOST_SHAPES[flavor] and a.rank_attention == a.rank_ffn == a.dim // 4


def tsr() -> str:
    """TSR-Adam, Tables 3 and 6."""
    rows = []
    for (flavor, rank, embedding, interval), cells in paper.TSR_CELLS.items():
        cost = published_tsr(FLAVORS["full"][flavor], TSRShape(rank, interval, embedding))
        name = f"TSR-Adam {flavor}, r = {rank} ({embedding}), K = {interval}"
        rows.append(_cells(name, cells, (cost.average, cost.peak, cost.memory)))
    for flavor, cells in paper.TSR_ADAMW_CELLS.items():
        cost = published_adamw(FLAVORS["full"][flavor])
        rows.append(_cells(f"AdamW {flavor}", cells, (cost.average, cost.peak, cost.memory)))
    for flavor, (rank, printed) in paper.TSR_GALORE_MEMORY.items():
        memory = published_galore_memory(FLAVORS["full"][flavor], rank)
        rows.append(
            [f"GaLore {flavor}, r = {rank}", "-", "-", f"{printed} → {_gb(printed, memory)}"]
        )
    return f"""## TSR-Adam, Tables 3 and 6: bytes and memory

Decimal GB, as printed → ours. The counting is the paper's (`published_tsr`): without the head, p =
q = 0, K_e = 2. `honest_tsr` counts everything that is sent; [TSR-Adam](tsr_adam.md) has both. We
found no formula for GaLore's bytes and peaks.

{markdown_table(["run", "GB per step", "peak", "memory"], rows)}"""


def _cells(name: str, printed: tuple[str, ...], values: tuple[float, ...]) -> list[str]:
    pairs = zip(printed, values, strict=True)
    return [name, *(f"{text} → {_gb(text, value)}" for text, value in pairs)]


def _gb(printed: str, value: float) -> str:
    return same(printed, value / 1e9)


def tagc() -> str:
    """TAGC: bits and Table 1."""
    bits, factor = paper.TAGC_BITS
    ours = sum(paper_bits(10, 1).values())
    rows = []
    for level, (c, theta) in LEVELS.items():
        loads = [c * union_density(ranks, theta) for ranks in (1, 2, 4, 8)]
        cells = [f"{load:.2f}{'' if load <= PEELING_LIMIT else ' (no)'}" for load in loads]
        rows.append([level, f"{100 * theta:g}%", *cells])
    return f"""## TAGC, Table 1 and Figure 2

Bits per parameter and rank at 10x with a 1-bit index: {bits} printed, {same(str(bits), ours)};
{factor} times fewer than 32: {same(str(factor), 32 / ours)}. Table 1's levels decode while c times
the density of the union of all ranks is at most {PEELING_LIMIT} (measured by
`scripts/papers/peeling_table.py`); beyond it: no.

{markdown_table(["level", "zeros", "1 rank", "2 ranks", "4 ranks", "8 ranks"], rows)}"""


def caat() -> str:
    """CAAT-Net, equations 29 to 33."""
    rows = []
    for equation, (formula, name, holds) in caat_equations().items():
        rows.append([equation, formula, f"`{name}`", "equal" if holds else "**differs**"])
    return f"""## CAAT-Net, equations 29 to 33: speed-up of a block

One forward pass of a GPT block, s tokens, width d, on T ranks; a rank does R operations in the time
of reducing one payload element. The paper prints formulas without values. `formulas/papers/caat.py`
has them for our blocks too.

{markdown_table(["equation", "formula", "function", "at three shapes"], rows)}"""


def caat_equations() -> dict[str, tuple[str, str, bool]]:
    """Return formula, function and whether they agree, by equation."""
    shapes = ((4096, 2048, 8, 0.5, 2e4), (768, 1024, 4, 0.25, 5e3), (8192, 4096, 16, 0.75, 1e5))
    holds: dict[str, list[bool]] = {number: [] for number in ("29", "30", "31", "32", "33")}
    for d, s, t, p, ratio in shapes:
        work, payload = gpt_block_operations(d, s), block_payload(d, s, 1.0)
        products, link = 12 * d + 2 * s, ratio * t  # both in units of 2ds/T operations
        seconds = 2 * d * s / t * (products + p * link)
        pairs = {
            "29": (work, 24 * s * d * d + 4 * s * s * d),
            "30": (block_payload(d, s, p), 2 * p * s * d),
            "31": (block_time(work, block_payload(d, s, p), t, ratio), seconds),
            "32": (speed_up(work, payload, p, t, ratio), (products + link) / (products + p * link)),
            "33": (hiding_fraction(work, payload, t, ratio), min(1.0, products / link)),
        }
        for number, (ours, formula) in pairs.items():
            holds[number].append(abs(ours / formula - 1) < 1e-12)
    formulas = {
        "29": ("24sd² + 4s²d", "gpt_block_operations"),
        "30": ("that over T; 2psd", "block_payload"),
        "31": ("2ds(12d + 2s + pRT)/T", "block_time"),
        "32": ("(12d + 2s + RT) / (12d + 2s + pRT)", "speed_up"),
        "33": ("min(1, (12d + 2s) / (RT))", "hiding_fraction"),
    }
    return {number: (*formulas[number], all(found)) for number, found in holds.items()}


def measured() -> str:
    """Return the timings that need the authors' hardware."""
    rows = [
        [
            f"{run.flavor}, T = {run.tensor_parallel}, PP = {run.pipeline_parallel}",
            *(f"{seconds:.2f}" for seconds in (run.full, run.vanilla, run.boost)),
            str(run.ranks),
        ]
        for run in paper.BOOST_ITERATION_SECONDS
    ]
    cola = [[name, f"{rate:,}", f"{gb}"] for name, (rate, gb) in paper.COLA_H100_1B.items()]
    return f"""## Timings that need GPUs

BOOST, Figure 6 (left): seconds per iteration on A100-80G, s = 4096, b = 4, bf16.
`python scripts/compare.py --tables` runs those that fit this machine's GPUs and prints the
published seconds next to its own.

{markdown_table(["model", "full", "vanilla", "BOOST", "GPUs"], rows)}

CoLA, Table 9, 1B on an H100, 64 sequences of 256 tokens. Each row is a run of
`CONFIG_FILE=train_configs/cola_1b.toml` (or `train_configs/full_1b.toml`) with `NGPU=1`,
`--training.local_batch_size=64` and `--activation_checkpoint.mode=` `none`, `full` (GCP) or
`low_rank` (CoLA-M).

{markdown_table(["run", "tokens/s", "GB"], cola)}"""


def page() -> str:
    """Return the whole page."""
    cola = (cola_flops, cola_memory, cola_training_flops)
    boost = (boost_communication, boost_intensity, boost_memory)
    parts = (*cola, *boost, tsr, tagc, caat, measured)
    return "\n\n".join([INTRODUCTION, *(part() for part in parts)]) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Write, show or check the page; return the exit status."""
    parser = OneLineParser(description=__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--print", action="store_true", help="print the page, write nothing")
    choice.add_argument("--check", action="store_true", help="compare with the file")
    options = parser.parse_args(argv)
    text = page()
    if options.print:
        print(text, end="")
    elif options.check:
        if not PAGE.is_file() or PAGE.read_text() != text:
            print(
                f"error: {PAGE} is out of date: run scripts/papers/paper_tables.py", file=sys.stderr
            )
            return 1
    else:
        PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
