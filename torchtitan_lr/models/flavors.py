# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The named shapes, common to all families; each family adds its ranks and nonlinearities.

Sources: ``60M`` to ``7B`` are CoLA's (Table 5), ``1B_boost``, ``3B``, ``13B`` and ``30B`` are
BOOST's, ``8B`` is Llama 3.1's. CoLA's 1B has d_ff 5461, which no tensor-parallel degree divides;
BOOST's 5472 is divisible by 2, 4 and 8.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.families import FAMILIES, ModelFamily
from torchtitan_lr.models.stored_args import is_file_name, read_flavor
from torchtitan_lr.titan.specs import RoPEScalingArgs

# dim, ffn_dim, n_heads, n_layers
_SHAPES: dict[str, tuple[int, int, int, int]] = {
    "debug": (128, 344, 8, 4),
    "tiny": (256, 688, 8, 2),
    "60M": (512, 1376, 8, 8),
    "130M": (768, 2048, 12, 12),
    "350M": (1024, 2736, 16, 24),
    "1B": (2048, 5461, 32, 24),
    "1B_boost": (2048, 5472, 32, 24),
    "3B": (3072, 8192, 24, 28),
    "7B": (4096, 11008, 32, 32),
    "8B": (4096, 14336, 32, 32),
    "13B": (5120, 13824, 40, 40),
    "30B": (8192, 22016, 64, 36),
}

_EXTRAS: dict[str, dict[str, Any]] = {
    # Small enough for a few hundred steps in minutes on two cores, and grouped-query so that the
    # default run exercises it; the vocabulary is that of the tokenizer shipped with the package.
    "debug": {"n_kv_heads": 4, "vocab_size": 4096},
    # The model of BOOST's loss-curve figure: two layers, h = 256.
    "tiny": {"vocab_size": 4096},
    "8B": {
        "n_kv_heads": 8,
        "vocab_size": 128256,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": RoPEScalingArgs(),
        "max_seq_len": 8192,
    },
}


class FlavorTable(Mapping[str, LlamaArgs]):
    """Flavors of one family by name, or from a file; each look-up gives a fresh copy.

    torchtitan looks a flavor up and then changes it in place, so a plain dict would carry one
    job's settings into the next.

    A flavor that ends with ``.json`` is read from that file, see `stored_args`. A file that is no
    model of this family raises a `ConfigError`, with ``in`` too.
    """

    def __init__(self, flavors: Mapping[str, LlamaArgs], family: str) -> None:
        self._flavors = dict(flavors)
        self._family = family

    def __getitem__(self, flavor: str) -> LlamaArgs:
        if is_file_name(flavor):
            return read_flavor(flavor, self._family)
        return copy.deepcopy(self._flavors[flavor])

    def __iter__(self) -> Iterator[str]:
        return iter(self._flavors)

    def __len__(self) -> int:
        return len(self._flavors)

    def add(self, flavor: str, args: LlamaArgs) -> None:
        """Add a shape, or replace the one of this name."""
        self._flavors[flavor] = copy.deepcopy(args)


def build_flavors(family: ModelFamily) -> FlavorTable:
    """Return every size of a family."""
    flavors = {}
    for size, (dim, ffn_dim, n_heads, n_layers) in _SHAPES.items():
        flavors[size] = LlamaArgs(
            family=family.name,
            dim=dim,
            ffn_dim=ffn_dim,
            n_heads=n_heads,
            n_layers=n_layers,
            **_EXTRAS.get(size, {}),
            **family.defaults(size),
        )
    return FlavorTable(flavors, family.name)


FLAVORS = {name: build_flavors(family) for name, family in FAMILIES.items()}
"""The flavors of every family: ``FLAVORS["cola"]["60M"]``."""
