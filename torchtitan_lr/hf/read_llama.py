# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Read the ``config.json`` of a Hugging Face LLaMA: what ``llama_full`` computes, and no more."""

from pathlib import Path
from typing import Any

from torchtitan_lr.config.files import read_json
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.titan.specs import RoPEScalingArgs

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
        The arguments of the same ``llama_full``, and whether embedding and head are tied over
        there.

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
    read = {key: reader.number(key) for key in _NUMBERS} | {
        "num_key_value_heads": reader.number("num_key_value_heads", heads),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-6, float),
        "max_position_embeddings": reader.number("max_position_embeddings", 2048),
    }
    return build_args(read, theta, scaling, "full", {}), bool(values.get("tie_word_embeddings"))


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


def _rotary(reader: _Reader) -> tuple[float, dict[str, Any] | None]:
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
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    length = "original_max_position_embeddings"
    return theta, {key: inner.number(key, kind=float) for key in keys} | {
        length: inner.number(length)
    }


def build_args(
    values: dict[str, Any], base: float, scaling: Any, family: str, kind: dict[str, Any]
) -> LlamaArgs:
    """Build a model's arguments from the keys of a ``config.json``.

    Args:
        values: Sizes of the model.
        base: The rotary base.
        scaling: The four numbers of scaled frequencies, by transformers' keys; none without them.
        family: The model's family.
        kind: Further arguments, of a low-rank model.
    """
    ranks: dict[str, Any] = {"rank_attention": 0, "rank_ffn": 0, "activation": "fullrank"}
    return LlamaArgs(
        family=family,
        dim=values["hidden_size"],
        n_layers=values["num_hidden_layers"],
        n_heads=values["num_attention_heads"],
        n_kv_heads=values["num_key_value_heads"],
        ffn_dim=values["intermediate_size"],
        vocab_size=values["vocab_size"],
        norm_eps=values["rms_norm_eps"],
        max_seq_len=values["max_position_embeddings"],
        rope_theta=base,
        rope_scaling=scaling
        and RoPEScalingArgs(
            scaling_factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_position_embeddings=scaling["original_max_position_embeddings"],
        ),
        **(ranks | kind),
    )
