# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""CoLA's sections of docs/paper_tables.md; `scripts/papers/paper_tables.py` writes the page."""

from typing import Any

from torchtitan_lr.formulas.flops import layer_flops
from torchtitan_lr.formulas.papers import published as paper
from torchtitan_lr.formulas.papers.cola_memory import (
    checkpointed_elements,
    checkpointed_flops,
    cola_elements,
    full_rank_elements,
    printed_training_flops,
    training_flops,
)
from torchtitan_lr.formulas.parameters import count_parameters, linear_parameters
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.tools.cli import markdown_table


def same(printed: str, value: float) -> str:
    """Return the value at the printed precision, and whether it is equal."""
    digits = len(printed.partition(".")[2])
    ours = f"{value:.{digits}f}"
    return f"{ours}, equal" if ours == printed else f"{ours}, **differs**"


def cola_flops() -> str:
    """CoLA, Tables 2, 3 and 7."""
    rows = []
    for flavor, printed in paper.COLA_TABLE_7.items():
        full, cola = (layer_flops(FLAVORS[family][flavor], 256) for family in ("full", "cola"))
        linears = [layer.attention_linears + layer.feed_forward for layer in (full, cola)]
        ratio = linears[1] / linears[0]
        whole = cola.total / full.total
        per_rank = ratio / FLAVORS["cola"][flavor].rank_ffn
        ranks = [r for r in range(1, 1024) if f"{r * per_rank:.1f}" == paper.COLA_TABLE_7_MORE]
        more = f"{ranks[0]} to {ranks[-1]}"
        rows.append([flavor, f"{printed}x", same(printed, ratio), f"{whole:.3f}", more])
    return f"""## CoLA, Tables 2, 3 and 7: FLOPs

Table 2 (forward: 8nd² + 4n²d + 6nd·d_ff; backward twice that) and the rows *Full-Rank* and *CoLA*
of Table 3 are equal to `layer_flops`, to the last FLOP. The other rows of Table 3 belong to
methods that are not implemented here. In its (Re)LoRA row, C_CoLA means the linears alone, as in
Appendix B: with Table 3's own C_CoLA, attention would count twice.

Table 7 divides CoLA's FLOPs by full rank's, at n = 256. The printed ratios are those of the
linears; with attention's products, 130M would be 0.6. A second row of CoLA has 0.7x at ranks that
are not printed; the last column has ranks that round to it. BERT-Large's ranks are printed, 384 and
512:
{same(paper.COLA_TABLE_7_MORE, bert_large_ratio())}.

{markdown_table(["model", "printed", "linears", "whole block", "ranks of 0.7x"], rows)}"""


def bert_large_ratio() -> float:
    """FLOPs of CoLA's BERT-Large over full rank: four d × d linears, and two of d × d_ff."""
    d, f, attention, feed_forward = paper.COLA_BERT_LARGE
    low = 4 * linear_parameters(d, d, attention) + 2 * linear_parameters(d, f, feed_forward)
    return low / (4 * d * d + 2 * d * f)


def cola_training_flops() -> str:
    """CoLA, the FLOPs of Table 9, and Figure 7."""
    rows = []
    for flavor, cells in paper.COLA_TABLE_9_FLOPS.items():
        d = FLAVORS["cola"][flavor].dim
        full, low = (table_4_shape(family, d) for family in ("full", "cola"))
        twice, once = printed_training_flops(full, low, 256), training_flops(full, low, 256)
        for name, printed in cells.items():
            line = [flavor, name, f"{printed}x", same(printed, twice[name]), f"{once[name]:.2f}"]
            rows.append(line)
    gcp, cola_m = (checkpointed_flops(table_4_shape(f, 2048), 256)[0] for f in ("full", "cola"))
    return f"""## CoLA, Table 9 and Figure 7: FLOPs of training

n = 256, d_ff = 2.5d, r = d/4. By Tables 3 and 4, GCP needs 1.33 times full rank's FLOPs, since each
block's forward pass is recomputed once, and CoLA-M about half. The printed numbers count
recomputation twice, attention included, and divide by full rank's linears alone. "4.6x" is GCP's
recomputation at 1B over CoLA-M's, by Table 4:
{same(paper.COLA_RECOMPUTATION, gcp / cola_m)} ({gcp / cola_m:.3f}).

{markdown_table(["model", "run", "printed", "twice, over linears", "Tables 3 and 4"], rows)}"""


def table_4_shape(family: str, dim: int) -> LlamaArgs:
    """Return a block's shape in CoLA's Table 4: d_ff = 2.5d, r = d/4, heads of 64."""
    rank = 0 if family == "full" else dim // 4
    ranks: dict[str, Any] = {"family": family, "rank_attention": rank, "rank_ffn": rank}
    if family == "full":
        ranks["activation"] = "fullrank"
    return LlamaArgs(dim=dim, ffn_dim=5 * dim // 2, n_heads=dim // 64, **ranks)


def cola_memory() -> str:
    """CoLA, Tables 4 and 5."""
    full, cola = table_4_shape("full", 1024), table_4_shape("cola", 1024)
    n, h, d, r = 256, 16, 1024, 256
    scores = 2 * n * n * h
    vanilla, cola_m = checkpointed_flops(full, n), checkpointed_flops(cola, n)
    attention = 4 * n * n * d
    rows = [
        ["Full-Rank", "20nd + 2n²h", f"{(full_rank_elements(full, n, h) - scores) / (n * d):g}nd"],
        ["Vanilla GCP", "nd", f"{checkpointed_elements(full, n) / (n * d):g}nd".removeprefix("1")],
        ["recomputed", "23nd² + 4n²d", f"{(vanilla[1] - attention) / (n * d * d):g}nd²"],
        [
            "CoLA",
            "17.5nd + 2n²h + 14nr",
            f"{(cola_elements(cola, n, h) - scores - 14 * n * r) / (n * d):g}nd",
        ],
        [
            "CoLA-M",
            "2nd + 7nr",
            f"{(checkpointed_elements(cola, n) - 7 * n * r) / (n * d):g}nd",
        ],
        ["recomputed", "18.5ndr + 4n²d", f"{(cola_m[1] - attention) / (n * d * r):g}ndr"],
    ]
    sizes = []
    for flavor, cells in paper.COLA_TABLE_5.items():
        for family, (millions, memory) in zip(("full", "cola"), cells, strict=True):
            total = count_parameters(FLAVORS[family][flavor]).total
            line = [flavor, family, f"{millions} M", same(millions, total / 1e6)]
            sizes.append([*line, memory, same(memory, 8 * total / 2**30)])
    header = ["model", "family", "printed", "parameters", "printed GB", "8 bytes each, GiB"]
    return f"""## CoLA, Table 4: activation memory and recomputation

Elements per block and sequence, at d_ff = 2.5d; ours without the terms in n²h and nr, which agree.
`formulas/papers/cola_memory.py` uses the paper's counting.

{markdown_table(["row", "printed", "ours"], rows)}

18.5ndr is half of the linears' forward pass. The linears that are recomputed, all up-projections
but the last, cost 18ndr. Our CoLA-M saves nd + 7nr, because the residual in the middle of a block
is recomputed from the o latent (`formulas/activations.py`).

## CoLA, Table 5: parameters and memory

Weights, gradients and Adam's two moments in bf16: 8 bytes per parameter. The "GB" are GiB.

{markdown_table(header, sizes)}"""
