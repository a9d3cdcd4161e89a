# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Names of parameters, without what wrappers put into them.

Torch's checkpoint wrapper, `torch.compile` and FSDP each insert a private name into the path of
every parameter below them; seen in torch 2.11 and 2.13. If upstream renames one, names differ
between layouts: initialization would draw other weights, TSR-Adam and gradient compression would
select other tensors. The door's test wraps a module and compares its names.
"""

import re

_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module)\.")


def clean_name(fqn: str) -> str:
    """Return a parameter's name without what wrappers of its modules put into it."""
    return _WRAPPERS.sub("", fqn)
