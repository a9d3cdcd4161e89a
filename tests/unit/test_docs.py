# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the pages name exists: links, commands, configurations, files, commits."""

import re
import subprocess

import pytest

from tests.commands import ROOT
from tests.support.pages import LINK
from torchtitan_lr.commands.main import COMMANDS
from torchtitan_lr.config.paths import shipped_configs

DOCS, PACKAGE = ROOT / "docs", ROOT / "torchtitan_lr"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])


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


def test_the_page_start_lists_every_command():
    table = (DOCS / "index.md").read_text().partition("## The command")[2].partition("## ")[0]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall("`([a-z-]+)`", row)} == set(COMMANDS)


def test_the_tree_of_the_code_is_the_packages():
    tree = (DOCS / "contributing.md").read_text().partition("```text\ntorchtitan_lr/\n")[2]
    room, named = "", set()
    for line in tree.partition("```")[0].splitlines():
        indent, names = re.match(r"( +)(\w+(?:/|\.py)(?:, \w+(?:/|\.py))*)", line).groups()
        if indent == "  ":
            room = ""
        named |= {room + name for name in names.split(", ")}
        room = room or names
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    rooms = {name.removesuffix("__init__.py") for name in files if name.endswith("/__init__.py")}
    assert named - files - rooms == set()
    assert rooms - named == set()


def test_the_figures_of_readme_stand_in_results():
    readme = (ROOT / "README.md").read_text()
    claims = readme.partition("## ")[0] + readme.partition("## Methods")[2].partition("## ")[0]
    figures = set(re.findall(r"\d+\.\d+", claims))
    assert len(figures) > 15
    assert figures - set(re.findall(r"\d+\.\d+", (DOCS / "results.md").read_text())) == set()


def git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None


@pytest.fixture(scope="module")
def texts():
    """All texts of the repository with the paths they stand in, CHANGELOG.md aside."""
    kinds = ("md", "py", "sh", "sbatch", "toml", "yaml", "yml")
    files = git("ls-files", *(f"*.{kind}" for kind in kinds))
    if files is None or git("rev-parse", "--is-shallow-repository") != "false\n":
        pytest.skip("no clone with its history")
    paths = [ROOT / name for name in files.splitlines() if name != "CHANGELOG.md"]
    return {path: path.read_text() for path in paths if path.exists()}


FILE = re.compile(
    r"\b(?:scripts|tests|torchtitan_lr|docs)/[\w/.-]*\w\.(?:py|sh|sbatch|toml|yaml|md)\b"
)
COMMIT = re.compile(r"\b[Cc]ommit\s+([0-9a-f]{7,40})\b")


def test_commits_that_are_cited_exist(texts):
    cited = {(commit, path) for path, text in texts.items() for commit in COMMIT.findall(text)}
    assert len(cited) > 10
    lost = [item for item in cited if git("cat-file", "-t", item[0]) != "commit\n"]
    assert lost == []


def test_files_that_are_named_exist(texts):
    """Or existed at the commit that the same paragraph cites."""
    lost = []
    for path, text in texts.items():
        for paragraph in text.split("\n\n"):
            commits = COMMIT.findall(paragraph)
            for name in FILE.findall(paragraph):
                there = (ROOT / name).exists() or "NAME" in name
                if not there and not any(git("cat-file", "-t", f"{c}:{name}") for c in commits):
                    lost.append((path.name, name))
    assert lost == []
