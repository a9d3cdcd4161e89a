# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""README and docs/ name files, code and keys that exist; links resolve; the drawing is correct."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from scripts.research import draw_btp
from tests.commands import ROOT
from torchtitan_lr.config.build import build_job_config

PAGES = sorted((ROOT / "docs").glob("*.md"))
DOOR = ROOT / "README.md"
EVERY = [*PAGES, DOOR, ROOT / "CONTRIBUTING.md"]
README_LINES, README_COLUMNS = 150, 100
SECTIONS = ("activation_checkpoint", "caat", "checkpoint", "grad_compression", "job", "low_rank")
SECTIONS += ("metrics", "model", "optimizer", "parallelism", "training", "validation")
SUFFIXES = ("py", "md", "toml", "sh", "png")


def quoted(text):
    """What stands between single backticks, code blocks aside."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def missing(text):
    """Names in a page that are nowhere."""
    config = build_job_config([])
    folders = ("torchtitan_lr", "tests", "scripts")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    source = "\n".join(path.read_text() for path in files if path != Path(__file__))
    lost = []
    for name in quoted(text):
        word = name.split()[0].removeprefix("python") or name.split()[1]
        section, _, key = word.removeprefix("--").partition("=")[0].partition(".")
        if re.fullmatch(rf"[\w/.]+\.({'|'.join(SUFFIXES)})|[\w/]+/", word):
            found = (ROOT / word).exists() or (ROOT / "torchtitan_lr" / word).exists()
        elif test := re.fullmatch(r"([\w/.]+\.py)::(\w+)", word):
            path = ROOT / test[1]
            found = path.exists() and f"def {test[2]}(" in path.read_text()
        elif section in SECTIONS and re.fullmatch(r"\w+", key):
            found = hasattr(getattr(config, section), key)
        elif re.fullmatch(r"[A-Za-z_]\w{3,}(\.\w+)?", word) and ("_" in word or word[0].isupper()):
            found = all(re.search(rf"\b{part}\b", source) for part in word.split("."))
        else:
            continue
        if not found:
            lost.append(name)
    return lost


def anchors(text):
    """The anchors of a page's headings, as mkdocs and GitHub make them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def broken_links(text, folder):
    """Relative links of a page whose file or heading does not exist.

    Args:
        text: The page.
        folder: Where the page lies.
    """
    broken = []
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    targets += re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    for target in targets:
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = folder / name
        lost = not path.exists()
        if not lost and anchor:
            lost = anchor not in anchors(path.read_text() if name else text)
        if lost:
            broken.append(target)
    return broken


def too_large(text):
    """What of a README is beyond its limits."""
    lines = text.splitlines()
    long = [line for line in lines if len(line) > README_COLUMNS]
    return long + ([f"{len(lines)} lines"] if len(lines) > README_LINES else [])


def in_nav(config):
    """The pages that the nav of a mkdocs.yml names."""
    nav = config.partition("\nnav:\n")[2].partition("\n\n")[0]
    return re.findall(r": ([\w/]+\.md)$", nav, re.MULTILINE)


def test_the_pages_are_there():
    names = {page.stem for page in PAGES}
    assert {"btp", "add_a_family", "add_a_plan", "paper_tables", "numerics"} <= names
    assert {"guide", "tsr_adam", "tagc", "caat_net", "support", "metrics", "results"} <= names


def test_every_page_is_in_the_nav_once():
    pages = in_nav((ROOT / "mkdocs.yml").read_text())
    written = (ROOT / "docs/results").glob("*.md")
    # The pages of experiments; other pages of measured runs are linked.
    beside = [f"results/{page.name}" for page in written if "<!-- scaling" in page.read_text()]
    assert sorted(pages) == sorted([*(page.name for page in PAGES), *beside])
    # The control: a page that is not listed is missed.
    assert in_nav("a: b\n\nnav:\n  - A: one.md\n  - B:\n      - C: two.md\n\nc: d.md\n") == [
        "one.md",
        "two.md",
    ]


def test_the_readme_is_a_door():
    assert too_large(DOOR.read_text()) == []


def test_a_readme_beyond_its_limits_is_noticed():
    assert too_large("é" * 100 + "\n" * 150) == []
    assert too_large("x" * 101) == ["x" * 101]
    assert too_large("\n" * 151) == ["151 lines"]


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page):
    text = page.read_text()
    assert missing(text) == []
    assert broken_links(text, page.parent) == []


def test_links_that_lead_nowhere_are_noticed(tmp_path):
    (tmp_path / "other.md").write_text("# One, two: `three`\n\n```text\n# none\n```\n")
    text = (
        "## Here\n[a](other.md) [b](other.md#one-two-three) [c](#here) [d](https://x.org/y.md)\n"
        "![e](no.png) [f](other.md#none) [g](#there)\n[h]: gone.md\n"
    )
    assert broken_links(text, tmp_path) == ["no.png", "other.md#none", "#there", "gone.md"]


def test_the_changelog_names_modules_that_exist():
    """Every new module of the table of moved ones is there, every old one is gone."""
    table = (ROOT / "CHANGELOG.md").read_text().partition("### Moved modules")[2]
    rows = re.findall(r"^\| `([\w.]+)`(:.*)? \| `([\w.]+)` \|$", table, re.MULTILINE)
    assert len(rows) > 100

    def exists(module):
        path = ROOT / "torchtitan_lr" / module.replace(".", "/")
        return path.with_suffix(".py").exists()

    assert [new for _, _, new in rows if not exists(new)] == []
    assert [old for old, part, _ in rows if not part and exists(old)] == []
    assert exists("train") and not exists("trane")


def test_names_that_do_not_exist_are_noticed():
    text = (
        "`parallel/btq.py` and `DownEdgy`, `low_rank.rnk=3`; `btp` is none; `models/layers.py` is; "
        "`tests/unit/test_docs.py::test_no` is none, `tests/unit/test_docs.py::missing` is"
    )
    lost = ["parallel/btq.py", "DownEdgy", "low_rank.rnk=3", "tests/unit/test_docs.py::test_no"]
    assert missing(text) == lost


def test_commands_of_the_pages_name_scripts_that_exist():
    for page in EVERY:
        for script in re.findall(r"(?:scripts|train_configs)/[\w./]+", page.read_text()):
            assert (ROOT / script.rstrip("./")).exists(), (page.name, script)


def test_chunks_of_the_drawing():
    """Three pieces a row, whose widths with the cuts between them make the row."""
    for parts in (draw_btp.ATTENTION, draw_btp.FEED_FORWARD):
        spans = draw_btp.chunks(parts)
        assert len(spans) == 1 + sum(part.kind == "sum" for part in parts) == 3
        assert spans[0][0] == 0 and spans[-1][1] == pytest.approx(sum(p.width for p in parts))
        assert all(begin < end for begin, end in spans)
        assert all(a[1] < b[0] for a, b in pairwise(spans))
    # Four forward calls and four backward ones, as grouped BTP has, 7r in each pass.
    for kind in ("sum", "back"):
        parts = [p for row in (draw_btp.ATTENTION, draw_btp.FEED_FORWARD) for p in row]
        widths = [part.text.split("\n")[0] for part in parts if part.kind == kind]
        assert widths == ["3r", "r", "2r", "r"]


def test_the_drawing_is_drawn(tmp_path, capsys):
    picture = tmp_path / "x" / "btp.png"
    assert draw_btp.main([f"--out={picture}"]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 50_000
    with pytest.raises(SystemExit) as info:
        draw_btp.main(["--out=btp.pdf"])
    assert info.value.code == 2
    assert "--out: got 'btp.pdf'" in capsys.readouterr().err
