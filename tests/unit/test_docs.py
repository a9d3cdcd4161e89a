# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What the pages name exists, their commands are accepted, and their tables are the programs'."""

import re
import subprocess

import pytest

from scripts import docs_keys
from scripts.research import result_tables
from tests.commands import ROOT
from tests.support.pages import LINK, documented
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.commands.main import COMMANDS, parser_of
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.parse import load_toml
from torchtitan_lr.config.paths import find_config, shipped_configs
from torchtitan_lr.launch.placement import fit

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


def test_the_page_of_keys_is_what_the_program_writes():
    assert docs_keys.PAGE.read_text() == docs_keys.render_page()


def test_every_key_of_the_shipped_files_is_on_its_page():
    text = docs_keys.PAGE.read_text()
    sections = {part.split("]`")[0]: part for part in text.split("## `[")[1:]}
    for name, path in shipped_configs().items():
        for section, table in load_toml(str(path)).items():
            for key in table:
                assert f"`{key}`" in sections[section], (name, section, key)


RESULTS = result_tables.PAGE.read_text()


@pytest.mark.parametrize("name", result_tables.placed(RESULTS))
def test_results_has_the_tables_of_the_stored_runs(name):
    stands = RESULTS.partition(f"<!-- table: {name} -->\n")[2].partition("<!-- end of table")[0]
    assert stands.strip() == result_tables.section(name)


# Files that a reader makes, by an earlier command or by hand.
MADE = re.compile(r"(mine|tiny|NAME|outputs/\w+/train)(\.toml)?$")


def training_config(variables, arguments):
    """The configuration of a ``train`` command, and its ranks; None for a reader's own file."""
    name = variables.get("CONFIG_FILE", "debug_cola")
    if arguments and not arguments[0].startswith("-"):
        name, arguments = arguments[0], arguments[1:]
    if not (ROOT / find_config(name)).is_file():
        assert MADE.search(name), name
        return None
    ranks = int(variables.get("NGPU", 8))
    ranks *= int(variables.get("NNODES", "1").rpartition(":")[2])
    return fitted([f"--job.config_file={find_config(name)}", *arguments], ranks), ranks


def fitted(arguments, ranks):
    """The configuration, fitted to its ranks as a run's."""
    overrides = fit(build_job_config(arguments), arguments, ranks)
    return build_job_config([*arguments, *(overrides or [])])


ALL = [(page, *command) for page in PAGES for command in documented(page)]


@pytest.mark.parametrize(
    ("page", "variables", "name", "arguments"),
    [pytest.param(*c, id=f"{c[0].stem}-{c[2]}-{i}") for i, c in enumerate(ALL)],
)
def test_a_documented_command_is_accepted(page, variables, name, arguments):
    assert name in COMMANDS
    if name == "train":
        if (found := training_config(variables, arguments)) is not None:
            check_job_config(*found, "cuda", data="paper")
        return
    arguments = [a for a in arguments if a not in ("…", "...")]
    parsed = parser_of(name).parse_args(arguments)
    if name == "estimate":
        for path in parsed.configs:
            world = parsed.world or 8
            config = fitted([f"--job.config_file={find_config(path)}", *parsed.overrides], world)
            check_job_config(config, world, "cuda", data="paper")


def test_the_pages_have_commands():
    names = [name for _, _, name, _ in ALL]
    assert names.count("train") > 20 and {"estimate", "generate", "export"} <= set(names)
