# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""``scripts/papers/peeling_table.py``: where the published levels hold and where they do not."""

import json

import pytest

from tests.scripts import load_script
from torchtitan_lr.compression.peeling import union_density
from torchtitan_lr.compression.sizes import LEVELS


@pytest.fixture(scope="module")
def script():
    return load_script("papers/peeling_table")


def test_the_union_is_as_dense_as_the_formula_says(script):
    for ranks in (2, 4, 8):
        found = script.peeled(ranks, 10, 0.9875, 40_000, 0)
        assert found["density"] == pytest.approx(union_density(ranks, 0.9875), rel=0.03)


def test_the_threshold_lies_between_the_limit_and_the_next_published_level(script):
    clean = (1 - 0.76 / 10) ** 0.25
    broken = (1 - 0.86 / 10) ** 0.25
    assert script.peeled(4, 10, clean, 60_000, 1)["peeled"] == 1
    assert script.peeled(4, 10, broken, 60_000, 1)["peeled"] < 0.5


def test_the_table_and_the_picture(script, tmp_path, capsys):
    picture = tmp_path / "x" / "peeling.png"
    # Small rows peel less surely: two entries may share all three cells.
    status = script.main(["--entries=20000", "--trials=2", "--json", f"--out={picture}"])
    rows = json.loads(capsys.readouterr().out)
    published = {(r["ranks"], r["level"]): r for r in rows if r["published"]}
    assert published.keys() == {(w, level) for w in (2, 4, 8) for level in LEVELS}
    for row in rows:
        if row["accepted"]:
            assert row["peeled"] > 0.999
        elif row["load"] > 0.85:
            assert row["peeled"] < 0.6
    assert status == (1 if any(r["accepted"] and r["whole"] < 0.5 for r in rows) else 0)
    assert published[4, "10x"]["accepted"] and not published[8, "10x"]["accepted"]
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_wrong_arguments_are_one_line(script, capsys):
    with pytest.raises(SystemExit) as info:
        script.main(["--entries=5"])
    assert info.value.code == 2
    assert "--entries: got 5, expected at least 100" in capsys.readouterr().err
