# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Every command of README and the pages is accepted.

``tests/integration/test_first_hour.py`` runs those of README and the page Start.
"""

import re

import pytest

from tests.commands import ROOT
from tests.support.pages import documented
from torchtitan_lr.checks.job import check_job_config
from torchtitan_lr.commands.main import COMMANDS, parser_of
from torchtitan_lr.config.build import build_job_config
from torchtitan_lr.config.paths import find_config
from torchtitan_lr.launch.placement import fit

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

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
            check_job_config(*found, "cuda", on_paper=True)
        return
    arguments = [a for a in arguments if a not in ("…", "...")]
    parsed = parser_of(name).parse_args(arguments)
    if name == "estimate":
        for path in parsed.configs:
            world = parsed.world or 8
            config = fitted([f"--job.config_file={find_config(path)}", *parsed.overrides], world)
            check_job_config(config, world, "cuda", on_paper=True)


def test_the_pages_have_commands():
    names = [name for _, _, name, _ in ALL]
    assert names.count("train") > 20 and {"estimate", "generate", "export"} <= set(names)
