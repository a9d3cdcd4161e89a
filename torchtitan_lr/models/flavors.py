# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The shapes by name, common to all families, or from a file.

Sources: ``60M`` to ``7B`` are CoLA's (Table 5), ``1B_boost``, ``3B``, ``13B`` and ``30B`` are
BOOST's, ``8B`` is Llama 3.1's. CoLA's 1B has d_ff 5461, which no tensor-parallel degree divides and
for which a GPU has slow products only; BOOST's 5472 is a multiple of 32. Ranks are d/4 but at 130M.
"""

import copy
import dataclasses
import json
from collections import UserDict
from pathlib import Path
from typing import Any

from torchtitan_lr.checkpoints.folders import write_whole
from torchtitan_lr.config.files import read_json
from torchtitan_lr.config.paths import user_path
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.families import FAMILIES, ModelFamily
from torchtitan_lr.titan.base import drop_marker
from torchtitan_lr.titan.specs import RoPEScalingArgs

# dim, ffn_dim, n_heads, n_layers, rank of every linear
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


MODEL_ARGS = "model_args.json"
SUFFIX = ".json"


def read_model_args(path: Path) -> LlamaArgs:
    """Read the ``model_args.json`` next to weights; a ConfigError if it has no valid model."""
    try:
        values = read_json(path)
        scaling = values.pop("rope_scaling", None)
        return LlamaArgs(**values, rope_scaling=scaling and RoPEScalingArgs(**scaling))
    except ConfigError:
        raise
    except (OSError, ValueError, ArithmeticError, TypeError, AttributeError) as error:
        want = "what torchtitan-lr export or torchtitan-lr import wrote"
        raise ConfigError(str(path), str(error), want) from error


def write_model_args(args: LlamaArgs, path: Path) -> None:
    """Write a model's arguments as JSON, unless the file has them: a run may be reading it."""
    text = json.dumps(drop_marker(dataclasses.asdict(args)), indent=2) + "\n"
    if not path.is_file() or path.read_bytes() != text.encode():
        write_whole(path, text)


class FlavorTable(UserDict[str, LlamaArgs]):
    """Flavors of one family by name or file; each look-up copies, as torchtitan changes it."""

    def __init__(self, family: ModelFamily) -> None:
        self.family = family
        super().__init__()
        for size, (dim, ffn_dim, n_heads, n_layers, rank) in _SHAPES.items():
            own: dict[str, Any] = family.defaults(size, rank) | _EXTRAS.get(size, {})
            own |= {"dim": dim, "ffn_dim": ffn_dim, "n_heads": n_heads, "n_layers": n_layers}
            self[size] = LlamaArgs(family=family.name, **own)

    def __contains__(self, flavor: object) -> bool:
        # Reads a file, so that one with another model is refused here too.
        is_file = str(flavor).endswith(SUFFIX)
        return self[str(flavor)] is not None if is_file else flavor in self.data

    def __getitem__(self, flavor: str) -> LlamaArgs:
        """Return a flavor by its name (KeyError), or of a ``.json`` file (ConfigError)."""
        # The path is relative to the working directory, else to the package's parent folder.
        if not flavor.endswith(SUFFIX):
            return copy.deepcopy(super().__getitem__(flavor))
        here = user_path(flavor, "model.flavor")
        shipped = Path(__file__).resolve().parents[2] / flavor
        found = shipped if not here.is_file() and shipped.is_file() else here
        if not found.is_file():
            raise ConfigError("model.flavor", flavor, f"a size such as debug, or a {MODEL_ARGS}")
        args = read_model_args(found)
        if args.family != self.family.name:
            want = f"{args.model_family.model_name!r} as in {flavor}"
            raise ConfigError("model.name", self.family.model_name, want)
        return args


FLAVORS = {name: FlavorTable(family) for name, family in FAMILIES.items()}
"""The flavors of every family: ``FLAVORS["cola"]["60M"]``."""
