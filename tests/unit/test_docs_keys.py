# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""docs/keys.md has every key of a run, and is what its program writes."""

from scripts.docs_keys import PAGE, render_page
from torchtitan_lr.config.parse import load_toml
from torchtitan_lr.config.paths import shipped_configs


def test_the_page_is_what_the_program_writes():
    assert PAGE.read_text() == render_page()


def test_every_key_of_the_shipped_files_is_on_the_page():
    sections = {part.split("]`")[0]: part for part in PAGE.read_text().split("## `[")[1:]}
    for name, path in shipped_configs().items():
        for section, table in load_toml(str(path)).items():
            for key in table:
                assert f"`{key}`" in sections[section], (name, section, key)
