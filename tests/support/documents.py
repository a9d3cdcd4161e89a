# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Documents kept apart by the masks of GPUs, on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.nn.attention import flex_attention as flex

from torchtitan_lr.models import llama
from torchtitan_lr.titan import base


@contextmanager
def masks_of_blocks(attention: Callable[..., Any] = flex.flex_attention) -> Iterator[None]:
    """Use ``flex_attention``'s masks, and ``attention`` in place of its compiled function.

    By default its formula in plain operators. This has a backward pass, but torch refuses it on a
    CPU, because the compiled one has none there.
    """
    with (
        patch.object(llama, "BLOCK_MASK_DEVICES", ("cpu",)),
        patch.object(llama, "create_attention_mask", flex.create_block_mask),
        patch.object(base.FlexAttentionWrapper, "_compiled_flex_attn", attention),
        patch.object(flex, "_validate_device", lambda *_: None),
    ):
        yield
