# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Parameter names without the prefixes that wrappers insert.

Torch's checkpoint wrapper, `torch.compile` and FSDP each insert a private name into the path of
every parameter below them; seen in torch 2.11 and 2.13. If upstream renames one, names differ
between layouts: initialization would draw other weights, and TSR-Adam and gradient compression
would select other tensors. A test wraps a module and compares its names.
"""

import re

_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")


def clean_name(fqn: str) -> str:
    """Return a parameter's name without the prefixes of module wrappers."""
    return _WRAPPERS.sub("", fqn)
