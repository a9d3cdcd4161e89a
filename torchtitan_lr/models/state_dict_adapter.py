# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Weights to and from Hugging Face's LLaMA."""

from pathlib import Path
from typing import Any

import torch

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.titan.specs import Llama3StateDictAdapter


class LlamaStateDictAdapter(Llama3StateDictAdapter):
    """Converts state dicts between our names and Hugging Face's.

    Full rank goes both ways, with the permutation between the two conventions of RoPE (torchtitan's
    own). svd merges into full-rank weights, one way. cola and lax, and models whose lanes keep
    channels to themselves, have no counterpart over there: their names stay ours.
    """

    def __init__(self, model_args: LlamaArgs, hf_assets_path: str | None) -> None:
        # Upstream warns when the folder has no index of weights, which is the normal case here.
        index = Path(hf_assets_path or "") / "model.safetensors.index.json"
        has_index = bool(hf_assets_path) and index.is_file()
        super().__init__(model_args, hf_assets_path if has_index else None)
        self.hf_assets_path = hf_assets_path
        self.llama_args = model_args

    @property
    def is_llama(self) -> bool:
        """Whether the model equals, exactly, a LLaMA that Hugging Face's code can run."""
        args = self.llama_args
        private_channels = args.lanes > 1 and args.sync_fraction < 1
        merges = args.model_family.factorises and args.activation == "fullrank"
        return not private_channels and (merges or not args.low_rank)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert our weights.

        Returns:
            Full-rank weights by Hugging Face's names for full and svd, else our own.
        """
        if not self.is_llama:
            return dict(state_dict)
        converted: dict[str, Any] = super().to_hf(merge_factors(state_dict))
        return converted

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert Hugging Face's weights.

        Raises:
            ConfigError: For svd, whose factors a full matrix does not determine, and for lanes with
                channels of their own.
        """
        family = self.llama_args.model_family
        if family.factorises:
            want = "llama_full: a full-rank matrix does not determine the factors of "
            raise ConfigError("model.name", family.model_name, want + family.model_name)
        if not self.is_llama and not self.llama_args.low_rank:
            want = "1 to load a LLaMA's weights, whose streams are one"
            raise ConfigError("caat.sync_fraction", self.llama_args.sync_fraction, want)
        if not self.is_llama:
            return dict(hf_state_dict)
        converted: dict[str, Any] = super().from_hf(hf_state_dict)
        return converted


def merge_factors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace every pair of factors by its product.

    Args:
        state_dict: Weights, among them pairs ``*.A.weight`` (r, d_in), ``*.B.weight`` (d_out, r).

    Returns:
        The weights with ``*.weight`` = B A (d_out, d_in) in place of the pairs, multiplied in fp32
        or better and given in the factors' dtype.
    """
    merged: dict[str, Any] = {}
    for name, value in state_dict.items():
        if name.endswith(".A.weight"):
            continue
        if not name.endswith(".B.weight"):
            merged[name] = value
            continue
        stem = name.removesuffix("B.weight")
        dtype = torch.promote_types(value.dtype, torch.float32)
        product = value.to(dtype) @ state_dict[f"{stem}A.weight"].to(dtype)
        merged[f"{stem}weight"] = product.to(value.dtype)
    return merged
