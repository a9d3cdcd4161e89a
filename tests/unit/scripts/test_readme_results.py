# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The README's results are those of docs/results.md and docs/results/."""

import re

from tests.scripts import ROOT, load_script

script = load_script("papers/readme_results")
README = (ROOT / "README.md").read_text()


def test_the_readme_is_up_to_date():
    table = script.results_table(script.read_pages())
    assert table in README
    assert script.insert(README, table) == README
    # The control: another figure changes the table, and nothing else of the page.
    figures = script.read_pages()
    figures["Plans side by side/vanilla/MB per step"] = "170.5"
    other = script.results_table(figures)
    assert script.insert(README, other) == README.replace("170.4", "170.5") != README


def test_losses_come_from_pages_of_several_seeds():
    """Each loss of the table is a figure of an experiment; a time is one of docs/results.md."""
    for method, measured, reference in script.ROWS:
        named = re.findall("{(.*?)}", measured + reference)
        pages = {name.partition(": ")[0] for name in named if ": " in name}
        assert len(pages) == ("loss" in method) and named, method
        for page in pages:
            assert "<!-- scaling" in (script.PAGES / f"{page}.md").read_text()
    names = " ".join(cell for row in script.ROWS for cell in row)
    for page in ("families", "optimizers", "tagc", "caat", "btp_loss", "rank"):
        assert f"{{{page}: " in names


def test_every_table_of_the_page_is_read():
    figures = script.read_figures(script.PAGE.read_text())
    assert figures["CAAT-Net, loss/0.5/random mask, 8 ranks"] == "2.239"
    assert figures["TAGC, loss/10×/summed index"] == "+12.6%"
    assert figures["TAGC over a slow link/FSDP2/MB per step"] == "29.4"  # after an empty cell


def test_of_two_budgets_the_larger_is_read():
    page = "\n## A\n\n| a | b | c |\n| - | - | - |\n| x | s | 1 |\n| y | s | 3 |\n| x | s | 2 |\n"
    figures = script.read_figures(page)
    assert (figures["A/x/c"], figures["A/x s/c"], figures["A/y s/c"]) == ("1", "2", "3")


def test_pages_of_experiments_are_read():
    figures = script.read_pages()
    assert figures["TSR-Adam over a slow link/AdamW/s per step"] == "0.95"
    name = "optimizers: Losses/{} short/validation loss"
    one, two = (figures[name.format(method)] for method in ("AdamW", "GaLore"))
    page = (script.PAGES / "optimizers.md").read_text().splitlines()
    for method, loss in (("AdamW", one), ("GaLore", two)):
        assert loss in next(line for line in page if line.startswith(f"| {method} | short |"))
    assert one != two and " ± " in one


def test_a_missing_figure_is_refused(capsys, monkeypatch, tmp_path):
    page = tmp_path / "results.md"
    page.write_text(script.PAGE.read_text().replace("| sketch | 1.09", "| sketches | 1.09"))
    monkeypatch.setattr(script, "PAGE", page)
    assert script.main([]) == 2
    want = "results.md: got 'TAGC over a slow link/sketch/s per step', expected a cell of one of"
    assert want in capsys.readouterr().err
    assert (ROOT / "README.md").read_text() == README


def test_the_command(capsys, monkeypatch, tmp_path):
    readme, other = tmp_path / "README.md", README.replace("1.43 s", "1.44 s")
    readme.write_text(other)
    monkeypatch.setattr(script, "README", readme)
    assert script.main(["--print"]) == 0
    assert capsys.readouterr().out.strip() in README
    assert readme.read_text() == other != README
    assert script.main([]) == 0
    assert readme.read_text() == README
