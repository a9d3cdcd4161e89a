# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Keys of a TOML, their types, and reading them."""
