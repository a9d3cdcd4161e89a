# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
import pytest

from torchtitan_lr.scaling.timing import as_text, draw, row_of


def timed(seconds, **more):
    return {"time_metrics/end_to_end(s)": seconds, "throughput/tokens_per_s": 8 / seconds, **more}


FOUND = {
    "rows": [
        {"mesh_dim": "tp", "calls": 3, "bytes": 100},
        {"mesh_dim": "tp", "calls": 1, "bytes": 20},
        {"mesh_dim": "fsdp", "calls": 2, "bytes": 7},
    ],
    "ranks": [
        {"communication": 0.2, "profiled_step": 1.0, "peak_memory_gib": 0.5},
        {"communication": 0.4, "profiled_step": 1.0, "peak_memory_gib": 0.7},
    ],
}


def test_a_row():
    row = row_of("btp", "none", [timed(s) for s in (1.0, 4.0, 2.0)], FOUND)
    assert (row["seconds"], row["seconds_min"], row["seconds_max"]) == (2.0, 1.0, 4.0)
    assert row["tokens_per_s"] == 4.0 and row["mfu"] is None
    assert row["comm_bytes"] == 127 and row["comm_calls"] == 6
    assert row["comm_bytes_by_mesh_dim"] == {"tp": 120, "fsdp": 7}
    assert row["comm_seconds"] == pytest.approx(0.3) and row["comm_seconds_min"] == 0.2
    assert row["peak_memory_gib"] == 0.7 and row["ranks"] == 2
    assert row["checkpointing"] == "none"
    known = row_of("btp", "none", [timed(1.0, **{"mfu(%)": 40.0})], FOUND)
    assert known["mfu"] == 40.0


def test_table_and_picture(tmp_path):
    rows = [
        row_of(name, "none", [timed(s)], FOUND) | {"published_seconds": published}
        for name, s, published in (("7B full", 3.0, 1.06), ("7B btp", 2.0, 0.72))
    ]
    header, first, second = as_text(rows).splitlines()
    assert header.split()[-2:] == ["published", "s"] and first.split()[-1] == "1.06"
    assert "1.50x" in second and "1.50x" not in first
    # Another model has its own first run.
    third = [rows[0], rows[1] | {"run": "13B full"}]
    assert "1.50x" not in as_text(third)
    draw(rows, tmp_path / "x" / "compare.png")
    assert (tmp_path / "x" / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_table_and_picture_name_the_mode_of_checkpointing(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    titles = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, text, **_: titles.append(text))
    for mode in ("full", "low_rank"):
        pairs = (("full", "full"), ("btp", mode))
        rows = [row_of(*pair, [timed(1.0)], FOUND) | {"published_seconds": None} for pair in pairs]
        lines = [line.split()[:2] for line in as_text(rows).splitlines()]
        assert lines == [["run", "checkpointing"], *map(list, pairs)]
        draw(rows, tmp_path / "compare.png")
    assert titles == [
        "activation checkpointing: full",
        "activation checkpointing: full (full), low_rank (btp)",
    ]
