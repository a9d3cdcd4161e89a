# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The papers' tables recomputed from ``formulas/``, at the precision printed.

TSR-Adam's tables are in test_tsr.py, TAGC's in test_compression.py. Where a paper is wrong, the
test says what it prints and what is right.
"""

from fractions import Fraction
from typing import Any

import pytest

from tests.scripts import load_script
from torchtitan_lr.formulas.activations import kept_bytes
from torchtitan_lr.formulas.communication import block_traffic
from torchtitan_lr.formulas.data_parallel import linear_volume
from torchtitan_lr.formulas.flops import layer_flops
from torchtitan_lr.formulas.intensity import arithmetic_intensity, feed_forward_products
from torchtitan_lr.formulas.papers.cola_memory import (
    checkpointed_elements,
    checkpointed_flops,
    cola_elements,
    full_rank_elements,
    printed_training_flops,
    training_flops,
)
from torchtitan_lr.formulas.papers.published import (
    BOOST_SHAPES,
    BOOST_TABLE_4,
    BOOST_TABLE_5,
    COLA_RECOMPUTATION,
    COLA_TABLE_5,
    COLA_TABLE_7,
    COLA_TABLE_9_FLOPS,
)
from torchtitan_lr.formulas.parameters import count_parameters
from torchtitan_lr.formulas.pipeline import boundary_elements
from torchtitan_lr.formulas.traffic import count
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.flavors import FLAVORS
from torchtitan_lr.parallel.tensor.plans import TPSettings

page = load_script("papers/paper_tables")
cola_page = load_script("papers/cola")


def shape(family: str = "cola", d: int = 1024, f: int = 2560, r: int = 256) -> LlamaArgs:
    rank = 0 if family == "full" else r
    sizes: dict[str, Any] = {"dim": d, "ffn_dim": f, "n_heads": 16, "n_layers": 3}
    return LlamaArgs(family=family, rank_attention=rank, rank_ffn=rank, **sizes)


def printed(value: float, like: str) -> str:
    return f"{value:.{len(like.partition('.')[2])}f}"


# CoLA


@pytest.mark.parametrize(("n", "d", "f"), [(256, 1024, 2736), (4096, 4096, 11008)])
def test_cola_table_2(n: int, d: int, f: int) -> None:
    layer = layer_flops(shape("full", d, f), n)
    forward = {"Q, K, V": 6 * n * d * d, "SDP": 4 * n * n * d, "Project": 2 * n * d * d}
    forward["Feed-forward"] = 6 * n * d * f
    assert layer.attention_linears == 3 * (forward["Q, K, V"] + forward["Project"])
    assert layer.attention_scores == 3 * forward["SDP"]
    assert layer.feed_forward == 3 * forward["Feed-forward"]
    backward = 16 * n * d * d + 8 * n * n * d + 12 * n * d * f
    assert layer.total == sum(forward.values()) + backward


@pytest.mark.parametrize(
    ("n", "d", "f", "r"), [(256, 1024, 2736, 256), (256, 512, 1376, 128), (4096, 4096, 11008, 1024)]
)
def test_cola_table_3(n: int, d: int, f: int, r: int) -> None:
    full = 24 * n * d * d + 12 * n * n * d + 18 * n * d * f
    cola = 48 * n * d * r + 12 * n * n * d + 18 * n * r * (d + f)
    assert layer_flops(shape("full", d, f), n).total == full
    assert layer_flops(shape("cola", d, f, r), n).total == cola
    # The control: a factor 2 on one product, or the rank of another model, is seen.
    assert layer_flops(shape("cola", d, f, r), n).total != cola + 2 * n * d * r
    assert layer_flops(shape("cola", d, f, 2 * r), n).total != cola


def test_cola_is_cheaper_below_r_062_d() -> None:
    """CoLA, section 3.3: at d_ff = 2.5d CoLA costs less than full rank where r < 0.62d."""
    d = 3200
    full = layer_flops(shape("full", d, 8000), 1).total

    def cola(r: int) -> int:
        return layer_flops(shape("cola", d, 8000, r), 1).total

    assert cola(int(0.62 * d)) < full < cola(int(0.63 * d))


def test_cola_table_4() -> None:
    n, h, d, r = 256, 16, 1024, 256
    full, cola = shape("full"), shape("cola")
    scores = 2 * n * n * h
    assert full_rank_elements(full, n, h) == 20 * n * d + scores
    assert cola_elements(cola, n, h) == 17.5 * n * d + scores + 14 * n * r
    assert checkpointed_elements(full, n) == n * d
    assert checkpointed_elements(cola, n) == 2 * n * d + 7 * n * r
    whole, repeated = checkpointed_flops(full, n)
    assert whole == repeated == 23 * n * d * d + 4 * n * n * d
    # The control: another d_ff has other factors.
    assert full_rank_elements(shape("full", f=2736), n, h) != 20 * n * d + scores


def test_cola_table_4_corrected() -> None:
    """18.5ndr is half of the forward pass; the linears that are repeated cost 18ndr."""
    n, d, r = 256, 1024, 256
    as_printed, right = checkpointed_flops(shape("cola"), n)
    assert as_printed == 18.5 * n * d * r + 4 * n * n * d
    assert right == 18 * n * d * r + 4 * n * n * d
    # Ours keeps one nd less: the residual in the middle of the block is made again.
    assert kept_bytes(shape("cola"), n, 16, 1) == checkpointed_elements(shape("cola"), n) - n * d


@pytest.mark.parametrize(("flavor", "cells"), COLA_TABLE_5.items())
def test_cola_table_5(flavor: str, cells: tuple[tuple[str, str], ...]) -> None:
    for family, (millions, memory) in zip(("full", "cola"), cells, strict=True):
        total = count_parameters(FLAVORS[family][flavor]).total
        assert printed(total / 1e6, millions) == millions
        assert printed(8 * total / 2**30, memory) == memory
    # The controls: tied embeddings would miss the parameters, decimal gigabytes the memory.
    tied = total - 32000 * FLAVORS["cola"][flavor].dim
    assert printed(tied / 1e6, millions) != millions
    assert flavor == "60M" or printed(8 * total / 1e9, memory) != memory


@pytest.mark.parametrize(("flavor", "ratio"), COLA_TABLE_7.items())
def test_cola_table_7(flavor: str, ratio: str) -> None:
    """The printed ratios are those of the linears; attention's products would make 130M 0.6."""
    full, cola = (layer_flops(FLAVORS[family][flavor], 256) for family in ("full", "cola"))
    linears = [layer.attention_linears + layer.feed_forward for layer in (full, cola)]
    assert printed(linears[1] / linears[0], ratio) == ratio
    with_attention = printed(cola.total / full.total, ratio)
    assert (with_attention == ratio) == (flavor != "130M")


def test_cola_table_7_at_larger_ranks() -> None:
    """Ranks of 0.7x are printed for BERT-Large alone; LLaMA's are those that round to it."""
    d, attention, feed_forward = 1024, 384, 512
    low = 4 * 2 * d * attention + 2 * 5 * d * feed_forward
    assert cola_page.bert_large_ratio() == low / (12 * d * d)
    assert printed(cola_page.bert_large_ratio(), "0.7") == "0.7"
    assert "| 60M | 0.4x | 0.4, equal | 0.441 | 211 to 242 |" in cola_page.cola_flops()


@pytest.mark.parametrize("flavor", COLA_TABLE_9_FLOPS)
def test_cola_table_9(flavor: str) -> None:
    """Tables 3 and 4 give 1.33 and .49 or .48; printed is the repetition twice, over linears."""
    n, d = 256, FLAVORS["cola"][flavor].dim
    full, low = shape("full", d, 5 * d // 2), shape("cola", d, 5 * d // 2, d // 4)
    cells = COLA_TABLE_9_FLOPS[flavor]
    twice = printed_training_flops(full, low, n)
    assert {name: printed(twice[name], cell) for name, cell in cells.items()} == cells
    # By hand, in units of nd².
    linears, attention, r = 69, n / d, 1 / 4
    assert twice["GCP"] == pytest.approx(1 + 2 * (23 + 4 * attention) / linears)
    assert twice["CoLA-M"] == pytest.approx((111 * r + 2 * (18.5 * r + 4 * attention)) / linears)
    once = training_flops(full, low, n)
    assert once["GCP"] == pytest.approx(4 / 3)
    assert printed(once["CoLA-M"], "0.48") == {"1B": "0.49", "7B": "0.48"}[flavor]
    # The control: counted once, neither is what is printed.
    assert all(printed(once[name], cells[name]) != cells[name] for name in ("GCP", "CoLA-M"))


def test_cola_repeats_46_times_less() -> None:
    n, d = 256, 2048
    full, low = shape("full", d, 5 * d // 2), shape("cola", d, 5 * d // 2, d // 4)
    ratio = checkpointed_flops(full, n)[0] / checkpointed_flops(low, n)[0]
    assert ratio == pytest.approx((23 * d + 4 * n) / (18.5 * d / 4 + 4 * n))
    assert printed(ratio, COLA_RECOMPUTATION) == COLA_RECOMPUTATION
    # The control: by what is really repeated it is another number.
    other = checkpointed_flops(full, n)[1] / checkpointed_flops(low, n)[1]
    assert printed(other, COLA_RECOMPUTATION) != COLA_RECOMPUTATION


# BOOST


def test_boost_table_4() -> None:
    """Weights of CoLA 7B on four ranks in bf16, with one of the two vocabulary tables."""
    d, f, r, layers, vocabulary = 4096, 11008, 1024, 32, 32000
    linears = layers * (8 * d * r + 3 * r * (d + f))
    weights = 2 * (linears + vocabulary * d) / 4 / 2**30
    for part, cell in BOOST_TABLE_4.items():
        assert printed(weights * (2 if part == "optimizer" else 1), cell) == cell
    # The control: both tables are too much.
    assert printed(2 * (linears + 2 * vocabulary * d) / 4 / 2**30, "1.25") == "1.31"
    text = page.boost_memory()
    assert "| weights | 1.25 | 1.25, equal |" in text
    assert "untied tables,\nweights take 1.31" in text


def test_boost_table_5() -> None:
    """The last column is the quotient of two others; vanilla's rows are exchanged in print."""
    found = {key: (printed(mb / ms, "1.0"), cell) for key, (mb, ms, cell) in BOOST_TABLE_5.items()}
    assert all(found["BOOST", batch][0] == found["BOOST", batch][1] for batch in (4, 8))
    (four, printed_four), (eight, printed_eight) = found["Vanilla", 4], found["Vanilla", 8]
    assert (four, eight) == (printed_eight, printed_four) != (eight, four)
    text = page.boost_memory()
    assert text.count("not equal") == 2 and "1.70, equal" in text and "1.56, equal" in text


def volume(args: LlamaArgs, plan: str, pass_: str = "forward") -> int:
    """Elements a token, without the statistics of norms, which the paper leaves out."""
    rows = block_traffic(args, TPSettings(plan), 1)
    return count([row for row in rows if row.role == "activation"], pass_)[1]


@pytest.mark.parametrize(
    ("d", "f", "r"), [(1024, 2560, 256), (1024, 4096, 256), (4096, 11008, 512)]
)
def test_boost_equations_2_and_3(d: int, f: int, r: int) -> None:
    full = volume(shape("full", d, f), "megatron")
    vanilla = volume(shape("cola", d, f, r), "vanilla_replicated")
    btp = volume(shape("cola", d, f, r), "btp")
    assert full == 2 * d
    assert vanilla == 5 * d + 2 * f == (5 + Fraction(2 * f, d)) / 2 * full
    assert btp == 7 * r == Fraction(7 * r, 2 * d) * full
    # The control: the fair form of vanilla, which shards the heads, is another formula.
    assert volume(shape("cola", d, f, r), "vanilla") == vanilla + d


def test_boost_ratios_of_section_4() -> None:
    """5 and 6.5 times full rank at d_ff = 2.5d and 4d; BTP 5.7 and 1.14 times less."""
    for f, times in ((2560, "5.0"), (4096, "6.5")):
        ratio = volume(shape("cola", f=f), "vanilla_replicated") / volume(shape("full"), "megatron")
        assert printed(ratio, times) == times
    btp = volume(shape(), "btp")
    assert printed(volume(shape(), "vanilla_replicated") / btp, "5.7") == "5.7"
    assert printed(volume(shape("full"), "megatron") / btp, "1.14") == "1.14"


def test_boost_table_6() -> None:
    d, f, r, layers = 1024, 2560, 256, 3
    assert linear_volume(shape("full")) == layers * (4 * d * d + 3 * d * f)
    assert linear_volume(shape()) == layers * (11 * d * r + 3 * f * r)
    # Tensor parallelism: two passes. The factor holds for full rank and BTP.
    for args, plan in ((shape("full"), "megatron"), (shape(), "btp")):
        assert volume(args, plan, "backward") == volume(args, plan)


def test_boost_table_6_corrected() -> None:
    """Vanilla's backward is not its forward again, and depends on who shares the all-reduce."""
    d, f = 1024, 2560
    args = shape()
    assert volume(args, "vanilla_replicated", "backward") == 3 * d + f
    apart = block_traffic(args, TPSettings("vanilla_replicated", grouping=False), 1)
    assert count(apart, "backward")[1] == 6 * d + f
    assert volume(args, "vanilla_replicated") == 5 * d + 2 * f  # which the paper doubles
    # What it leaves out of BTP: two statistics a pass, none in backward with the online norm.
    rows = [row for row in block_traffic(args, TPSettings("btp"), 1) if row.role == "statistic"]
    assert (count(rows, "forward")[1], count(rows, "backward")[1]) == (2, 0)


def test_boost_table_6_corrected_for_pipelines() -> None:
    """2pbsd is d a token; a rank sends d/T under BTP, and LaX its seven latents."""
    for family, latents in (("cola", 0), ("lax", 7 * 256)):
        elements = boundary_elements(shape(family), TPSettings("btp"), 4, 128, blocks_before=1)
        assert elements == 128 * (1024 // 4 + latents)
    assert boundary_elements(shape("full"), TPSettings("megatron"), 4, 128, 1) == 128 * 1024


@pytest.mark.parametrize("tokens", [4096, 16384])
@pytest.mark.parametrize(("t", "d", "f", "r"), [(4, 4096, 16384, 1024), (8, 2048, 5120, 512)])
def test_boost_table_7(tokens: int, t: int, d: int, f: int, r: int) -> None:
    a, beta, bs = Fraction(f, d), Fraction(d, r), tokens
    rows = {
        "megatron": (
            4 * a * bs * d * d / t,
            4 * d * (bs + a * (d + bs) / t),
            a * bs * d * d / (bs * d * t + a * d * (d + bs)),
        ),
        "vanilla": (
            4 * (1 + a) * bs * d * d / (beta * t),
            4 * d * ((1 + a) * bs + ((1 + a) * d + 2 * bs) / (beta * t)),
            4
            * bs
            * d
            * d
            * (1 + a)
            / (4 * bs * d * beta * t * (1 + a) + 4 * d * d * (1 + a) + 8 * bs * d),
        ),
        "btp": (
            4 * (1 + a) * bs * d * d / (beta * t),
            4 * d * (((1 + a) * (beta * bs + d) + 2 * bs * t) / (beta * t)),
            4
            * bs
            * d
            * d
            * (1 + a)
            / (4 * beta * bs * d * (1 + a) + 4 * d * d * (1 + a) + 8 * bs * d * t),
        ),
    }
    for plan, (flops, moved, intensity) in rows.items():
        args = shape("full" if plan == "megatron" else "cola", d, f, r)
        products = feed_forward_products(args, plan, t, tokens)
        assert sum(product.flops for product in products) == flops
        assert 2 * sum(product.elements for product in products) == moved
        assert arithmetic_intensity(products) == pytest.approx(float(intensity), rel=1e-12)
    # The control: another degree moves other bytes.
    other = feed_forward_products(args, "btp", 2, tokens)
    assert arithmetic_intensity(other) != pytest.approx(float(intensity), rel=1e-3)


def test_boost_intensities_that_the_text_names() -> None:
    """7B, T = 4: vanilla has 0.2 of full rank's, BTP 2.5 times vanilla's; at b = 1, 2.45."""
    low, full = FLAVORS["cola"]["7B"], FLAVORS["full"]["7B"]

    def value(args: LlamaArgs, plan: str) -> float:
        return arithmetic_intensity(feed_forward_products(args, plan, 4, 4096))

    assert printed(value(low, "vanilla") / value(full, "megatron"), "0.2") == "0.2"
    assert value(low, "btp") / value(low, "vanilla") == pytest.approx(2.5, rel=0.03)


@pytest.mark.parametrize("flavor", BOOST_SHAPES)
def test_boost_table_8(flavor: str) -> None:
    assert page.matches(flavor)
    assert FLAVORS["full"][flavor].ffn_dim == BOOST_SHAPES[flavor][3]


# CAAT-Net


def test_caat_equations() -> None:
    equations = page.caat_equations()
    assert list(equations) == ["29", "30", "31", "32", "33"]
    assert all(holds for _, _, holds in equations.values())


def test_another_equation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a feed-forward of three matrices is not equation 29, nor 31 to 33."""
    monkeypatch.setattr(page, "gpt_block_operations", lambda d, s: 32 * s * d * d + 4 * s * s * d)
    holds = {number: found for number, (_, _, found) in page.caat_equations().items()}
    assert holds == {"29": False, "30": True, "31": False, "32": False, "33": False}


# The page


def test_the_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["--check"]) == 0, "run scripts/papers/paper_tables.py"
    text = page.page()
    assert "differs" not in text and text.count("equal") > 60


def test_a_stale_page_is_noticed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    assert page.main(["--check"]) == 1
    assert page.main([]) == 0 and page.main(["--check"]) == 0
    (tmp_path / "page.md").write_text(page.page().replace("0.43", "0.44"))
    assert page.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert page.main(["--print"]) == 0 and capsys.readouterr().out == page.page()
    # A formula that gave another number would be seen on the page.
    assert page.same("0.43", 0.4349) == "0.43, equal" and "differs" in page.same("0.43", 0.4351)
