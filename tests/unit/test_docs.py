# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the pages name exists: links, commands, configurations."""

import re

import pytest

from tests.commands import ROOT
from torchtitan_lr.commands.main import COMMANDS
from torchtitan_lr.config.paths import shipped_configs

DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(text, folder):
    found = []
    for target in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        path, _, anchor = target.partition("#")
        file = folder / path if path else None
        if "://" in target or target.startswith("mailto:"):
            continue
        missing = file is not None and not file.exists()
        if missing or (anchor and anchor not in anchors(file.read_text() if file else text)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    assert broken_links(page.read_text(), page.parent) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page):
    blocks = re.findall(r"```(?:bash|text|)\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    named = [m[1] for line in lines if (m := re.match(r"torchtitan-lr ([a-z-]+)", line))]
    assert set(named) <= set(COMMANDS)
    configs = {m for line in lines for m in re.findall(r"train_configs/(\w+)\.toml", line)}
    assert configs <= set(shipped_configs()) | {"mine"}
