# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The pages of docs/ name files, code and keys that exist; the drawing is the formulas'."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.test_export import load_script
from torchtitan_lr.config.build import build_job_config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
SECTIONS = ("activation_checkpoint", "checkpoint", "grad_compression", "job", "low_rank", "metrics")
SECTIONS += ("model", "optimizer", "parallelism", "training", "validation")
SUFFIXES = ("py", "md", "toml", "sh", "png")

draw_btp = load_script("papers/draw_btp")


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


def test_the_pages_are_there():
    names = {page.stem for page in PAGES}
    assert {"btp", "add_a_family", "add_a_plan", "paper_tables", "numerics"} <= names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page):
    assert missing(page.read_text()) == []
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_names_that_do_not_exist_are_noticed():
    text = (
        "`parallel/btq.py` and `DownEdgy`, `low_rank.rnk=3`; `btp` is none; `models/layers.py` is; "
        "`tests/unit/test_docs.py::test_no` is none, `tests/unit/test_docs.py::missing` is"
    )
    lost = ["parallel/btq.py", "DownEdgy", "low_rank.rnk=3", "tests/unit/test_docs.py::test_no"]
    assert missing(text) == lost


def test_commands_of_the_pages_name_scripts_that_exist():
    for page in PAGES:
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
