# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Names of parameters, without what wrappers put into them."""

import re

# Wrappers that appear in a parameter's path without being part of its name.
_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")


def clean_name(fqn: str) -> str:
    """Return a parameter's name without what wrappers of its modules put into it."""
    return _WRAPPERS.sub("", fqn)
