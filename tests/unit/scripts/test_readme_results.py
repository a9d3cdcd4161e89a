# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The README's results are those of docs/results.md."""

from tests.scripts import ROOT, load_script

script = load_script("papers/readme_results")
README = (ROOT / "README.md").read_text()


def test_the_readme_is_up_to_date():
    table = script.results_table(script.read_figures(script.PAGE.read_text()))
    assert table in README
    assert script.insert(README, table) == README
    # The control: another figure changes the table, and nothing else of the page.
    other = script.results_table(
        script.read_figures(script.PAGE.read_text().replace("| 170.4 |", "| 170.5 |"))
    )
    assert script.insert(README, other) == README.replace("170.4", "170.5") != README


def test_every_table_of_the_page_is_read():
    figures = script.read_figures(script.PAGE.read_text())
    assert figures["TSR-Adam, loss and bytes/AdamW/total MB"] == "2,944"
    assert figures["CAAT-Net, loss/0/8 lanes"] == "2.057"
    assert figures["TAGC over a slow link/FSDP2/MB per step"] == "29.4"  # after an empty cell


def test_pages_of_experiments_are_read():
    figures = script.read_pages()
    assert figures["TSR-Adam, loss and bytes/AdamW/total MB"] == "2,944"
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
    readme, other = tmp_path / "README.md", README.replace("1.64 s", "1.65 s")
    readme.write_text(other)
    monkeypatch.setattr(script, "README", readme)
    assert script.main(["--print"]) == 0
    assert capsys.readouterr().out.strip() in README
    assert readme.read_text() == other != README
    assert script.main([]) == 0
    assert readme.read_text() == README
