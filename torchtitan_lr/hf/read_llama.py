# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Read the ``config.json`` of a Hugging Face LLaMA, or of an export with code.

What ``llama_full`` computes, and no more; an export with code has LLaMA's keys, and a table.
"""

from pathlib import Path
from typing import Any

from torchtitan_lr.config.files import read_json
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.titan.specs import RoPEScalingArgs

CODED = "torchtitan_lr"
"""The table that an export has if it brings its code."""
CODED_ACT = "torchtitan_lr: load with trust_remote_code=True"
"""Its ``hidden_act``: LLaMA's own class fails with it, where it would draw the linears anew."""
CODED_KEYS = (
    *("family", "activation", "rank_attention", "rank_ffn"),
    *("lax_gate", "lanes", "sync_fraction"),
)
"""What the table says, by the names of `LlamaArgs`."""

_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu", "swish"), "'silu', SwiGLU's"),
    "attention_bias": ((False, None), "false: the linears have no bias here"),
    "mlp_bias": ((False, None), "false: the linears have no bias here"),
    "attention_dropout": ((0, None), "0: there is no dropout here"),
    "quantization_config": ((None,), "weights that are not quantized"),
    "rope_interleaved": ((False, None), "false"),
}
"""Keys with the values that ``llama_full`` has, and what to say of another value."""

_NUMBERS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "vocab_size"),
)
"""Keys without a default."""

_SCALED = "llama3"
"""The kind of scaled rotary frequencies that `models.llama` has."""


def read_llama_args(path: Path) -> tuple[LlamaArgs, bool]:
    """Read a configuration of transformers' LLaMA, of version 4 or 5.

    Returns:
        The model's arguments, ``llama_full``'s for a LLaMA without a table of ours; what does not
        change its function has its default. And whether embedding and head are tied over there.

    Raises:
        ConfigError: It is no LLaMA, or has a setting that ``llama_full`` does not have; the error
            names the key.
    """
    try:
        values = read_json(path)
        kind = values["model_type"]
    except (OSError, ValueError, KeyError) as error:
        want = "the configuration of a Hugging Face LLaMA"
        raise ConfigError(str(path), f"{type(error).__name__}: {error}", want) from error
    if kind != "llama":
        raise ConfigError("model_type", kind, f"'llama' in {path}")
    table = values.get(CODED)
    if table is not None:
        if not isinstance(table, dict) or set(table) != set(CODED_KEYS):
            raise ConfigError(CODED, table, f"a table of {', '.join(CODED_KEYS)}, in {path}")
        values |= {"hidden_act": "silu"} if values.get("hidden_act") == CODED_ACT else {}
    for key, (allowed, want) in _ONLY.items():
        if values.get(key) not in allowed:
            raise ConfigError(key, values[key], f"{want}, in {path}")
    reader = _Reader(path, values)
    theta, scaling = _rotary(reader)
    heads = reader.number("num_attention_heads")
    dim = reader.number("hidden_size")
    head_dim = values.get("head_dim")
    if head_dim is not None and head_dim * heads != dim:
        want = f"hidden_size / num_attention_heads = {dim / heads:g}, in {path}"
        raise ConfigError("head_dim", head_dim, want)
    numbers = {key: reader.number(key) for key in _NUMBERS}
    dense = {"family": "full", "rank_attention": 0, "rank_ffn": 0, "activation": "fullrank"}
    args = LlamaArgs(
        dim=dim,
        n_layers=numbers["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=reader.number("num_key_value_heads", heads),
        ffn_dim=numbers["intermediate_size"],
        vocab_size=numbers["vocab_size"],
        norm_eps=reader.number("rms_norm_eps", 1e-6, float),
        max_seq_len=reader.number("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        **(dense if table is None else table),
    )
    return args, bool(values.get("tie_word_embeddings"))


class _Reader:
    """Numbers of a configuration, checked one by one."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def number(self, key: str, default: Any = None, kind: type = int) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        kinds = (int,) if kind is int else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < 2**63:
            raise ConfigError(key, value, f"a positive number in {self.path}")
        return kind(value)


def _rotary(reader: _Reader) -> tuple[float, RoPEScalingArgs | None]:
    """Read base and scaling: ``rope_parameters`` of version 5, two keys of version 4."""
    key = "rope_parameters" if reader.values.get("rope_parameters") else "rope_scaling"
    given = reader.values.get(key) or {}
    if not isinstance(given, dict):
        raise ConfigError(key, given, f"a table in {reader.path}")
    inner = _Reader(reader.path, {"rope_theta": reader.values.get("rope_theta")} | given)
    theta = inner.number("rope_theta", 10000.0, float)
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("partial_rotary_factor", 1) != 1:
        want = f"1: whole heads are rotated here, in {reader.path}"
        raise ConfigError("partial_rotary_factor", given["partial_rotary_factor"], want)
    if kind == "default":
        return theta, None
    if kind != _SCALED:
        want = f"'default' or '{_SCALED}' as {key}'s rope_type in {reader.path}"
        raise ConfigError(key, kind, want)
    return theta, RoPEScalingArgs(
        scaling_factor=inner.number("factor", kind=float),
        low_freq_factor=inner.number("low_freq_factor", kind=float),
        high_freq_factor=inner.number("high_freq_factor", kind=float),
        original_max_position_embeddings=inner.number("original_max_position_embeddings"),
    )
