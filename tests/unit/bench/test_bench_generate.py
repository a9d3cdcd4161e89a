# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A rehearsal of ``scripts/check/bench_generate.py`` on the smallest models."""

import json

import pytest

from tests.scripts import load_script

script = load_script("check/bench_generate")

TINY = ["--flavor=debug", "--batch=1,3", "--prompt_tokens=8", "--new_tokens=3", "--repeats=1"]


def test_rehearsal(capsys):
    assert script.main([*TINY, "--variants=full,cola,cola_latent", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {(row["variant"], row["batch"]): row for row in report["rows"]}
    assert set(rows) == {(v, b) for v in ("full", "cola", "cola_latent") for b in (1, 3)}
    for (name, batch), row in rows.items():
        # debug: 4 blocks, 4 key and value heads of 16, rank 32; 8 + 3 - 1 columns.
        values = 32 if name == "cola_latent" else 64
        assert row["cache_bytes"] == 4 * 4 * batch * 10 * (64 + values)
        assert row["tokens_per_s"] == pytest.approx(batch / row["decode"]) and row["first"] > 0
    assert rows["full", 1]["decode_speed_up"] == 1
    # full: 4 · (2 · 128² + 2 · 128 · 64 + 3 · 128 · 344) + 4096 · 128 and 9 norms of 128;
    # cola: 4 · 32 · (2 · 256 + 2 · 192 + 3 · 472) instead of the first.
    head = 4096 * 128 + 9 * 128
    full = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 344) + head
    cola = 4 * 32 * (2 * 256 + 2 * 192 + 3 * 472) + head
    assert rows["cola", 3]["weights_speed_up"] == pytest.approx(full / cola)


def test_table(capsys):
    assert script.main([*TINY, "--variants=full"]) == 0
    title, header, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("debug float32, cpu, ") and "tokens/s" in header
    assert [line.split()[:2] for line in lines] == [["full", "1"], ["full", "3"]]


@pytest.mark.parametrize(
    ("option", "part"),
    [
        ("--variants=full,full_latent", "--variants: got 'full_latent', expected some of full"),
        ("--batch=1,two", "--batch: got"),
        ("--batch=0", "--batch: got"),
        ("--new_tokens=1", "--new_tokens: got 1, expected at least 2"),
    ],
)
def test_refusals(capsys, option, part):
    with pytest.raises(SystemExit) as info:
        script.main([*TINY, option])
    assert info.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {part}") and message.count("\n") == 1
