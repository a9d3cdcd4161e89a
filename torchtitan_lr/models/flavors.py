# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The named shapes of every family.

Sources: ``60M`` to ``7B`` are CoLA's (Table 5, with their ranks), ``1B_boost``, ``3B``, ``13B`` and
``30B`` are BOOST's, ``8B`` is Llama 3.1 with a rank of d/4. CoLA's 1B has d_ff 5461, which no
tensor-parallel degree divides; BOOST's 5472 is divisible by 2, 4 and 8.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan.models.llama3.model.args import RoPEScalingArgs

from torchtitan_lr.models.args import FAMILIES, Activation, Family, LlamaArgs

# dim, ffn_dim, n_heads, n_layers, rank
_SHAPES: dict[str, tuple[int, int, int, int, int]] = {
    "debug": (128, 344, 8, 4, 32),
    "tiny": (256, 688, 8, 2, 64),
    "60M": (512, 1376, 8, 8, 128),
    "130M": (768, 2048, 12, 12, 256),
    "350M": (1024, 2736, 16, 24, 256),
    "1B": (2048, 5461, 32, 24, 512),
    "1B_boost": (2048, 5472, 32, 24, 512),
    "3B": (3072, 8192, 24, 28, 768),
    "7B": (4096, 11008, 32, 32, 1024),
    "8B": (4096, 14336, 32, 32, 1024),
    "13B": (5120, 13824, 40, 40, 1280),
    "30B": (8192, 22016, 64, 36, 2048),
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

# CoLA, Appendix on Table 10: keeping SwiGLU's SiLU helps up to 130M and no longer at 350M.
_KEEPS_OUTER_SILU = ("debug", "tiny", "60M", "130M")


class FlavorTable(Mapping[str, LlamaArgs]):
    """Flavors of one family by name; each look-up gives a fresh copy.

    torchtitan looks a flavor up and then changes it in place, so a plain dict would carry one
    job's settings into the next.
    """

    def __init__(self, flavors: Mapping[str, LlamaArgs]) -> None:
        self._flavors = dict(flavors)

    def __getitem__(self, flavor: str) -> LlamaArgs:
        return copy.deepcopy(self._flavors[flavor])

    def __iter__(self) -> Iterator[str]:
        return iter(self._flavors)

    def __len__(self) -> int:
        return len(self._flavors)


def _default_activation(family: Family, flavor: str) -> Activation:
    # Without σ in the bottleneck, svd must keep LLaMA's SwiGLU: it then merges into a LLaMA.
    if family in ("full", "svd"):
        return "fullrank"
    return "both" if flavor in _KEEPS_OUTER_SILU else "lowrank"


def _build_flavor(family: Family, flavor: str) -> LlamaArgs:
    dim, ffn_dim, n_heads, n_layers, rank = _SHAPES[flavor]
    rank = 0 if family == "full" else rank
    return LlamaArgs(
        family=family,
        dim=dim,
        ffn_dim=ffn_dim,
        n_heads=n_heads,
        n_layers=n_layers,
        rank_attention=rank,
        rank_ffn=rank,
        activation=_default_activation(family, flavor),
        **_EXTRAS.get(flavor, {}),
    )


FLAVORS: dict[str, FlavorTable] = {
    family: FlavorTable({flavor: _build_flavor(family, flavor) for flavor in _SHAPES})
    for family in FAMILIES
}
"""The flavors of every family: ``FLAVORS["cola"]["60M"]``."""
