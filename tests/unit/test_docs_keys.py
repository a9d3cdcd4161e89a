# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""docs/keys.md has every key of a run, and is what its program writes."""

from scripts.docs_keys import PAGE, render_page
from torchtitan_lr.commands.config import list_configs
from torchtitan_lr.config.parse import load_toml
from torchtitan_lr.config.paths import find_config


def test_the_page_is_what_the_program_writes():
    assert PAGE.read_text() == render_page()


def test_every_key_of_the_shipped_files_is_on_the_page():
    sections = {part.split("]`")[0]: part for part in PAGE.read_text().split("## `[")[1:]}
    for row in list_configs():
        for section, table in load_toml(find_config(row["name"])).items():
            for key in table:
                assert f"`{key}`" in sections[section], (row["name"], section, key)
