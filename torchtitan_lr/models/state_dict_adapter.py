# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Weights to and from Hugging Face's LLaMA."""

from pathlib import Path
from typing import Any

import torch

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.titan.specs import Llama3StateDictAdapter

_FACTORS = ("A.weight", "B.weight", "gate")  # in the place of ``weight``


class LlamaStateDictAdapter(Llama3StateDictAdapter):
    """Converts state dicts between our names and Hugging Face's.

    Full rank goes both ways, with torchtitan's permutation of RoPE. svd merges into full-rank
    weights, one way. Others, and svd if ``coded``, keep their tensors under LLaMA's names, both
    ways.
    """

    def __init__(
        self, model_args: LlamaArgs, hf_assets_path: str | None, coded: bool = False
    ) -> None:
        # Upstream warns when the folder has no index of weights, which is the normal case here.
        index = Path(hf_assets_path or "") / "model.safetensors.index.json"
        has_index = bool(hf_assets_path) and index.is_file()
        super().__init__(model_args, hf_assets_path if has_index else None)
        self.hf_assets_path = hf_assets_path
        self.llama_args, self.coded = model_args, coded
        for theirs, ours in list(self.from_hf_map.items()):
            if theirs.endswith("_proj.weight"):
                for name in _FACTORS:
                    stem = theirs.removesuffix("weight")
                    self.from_hf_map[stem + name] = ours.removesuffix("weight") + name

    @property
    def is_llama(self) -> bool:
        """Whether the model equals, exactly, a LLaMA that Hugging Face's code can run."""
        args = self.llama_args
        private_channels = args.lanes > 1 and args.sync_fraction < 1
        merges = args.model_family.factorises and args.activation == "fullrank"
        return not private_channels and (merges or not args.low_rank)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert our weights."""
        if self.is_llama and not self.coded:
            state_dict = merge_factors(state_dict)
        converted: dict[str, Any] = super().to_hf(state_dict)
        for name, heads in self._rotated(converted):
            converted[name] = self._permute(converted[name], heads)
        return converted

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert Hugging Face's weights."""
        # Unless ``coded``, a ConfigError refuses svd, whose factors a full matrix does not
        # determine, and lanes with channels of their own.
        args, family = self.llama_args, self.llama_args.model_family
        if not self.coded and family.factorises:
            want = "llama_full: a full-rank matrix does not determine the factors of "
            raise ConfigError("model.name", family.model_name, want + family.model_name)
        if not self.coded and not self.is_llama and not args.low_rank:
            want = "1 to load a LLaMA's weights, whose streams are one"
            raise ConfigError("caat.sync_fraction", args.sync_fraction, want)
        theirs = dict(hf_state_dict)
        for name, heads in self._rotated(theirs):
            theirs[name] = self._reverse_permute(theirs[name], heads)
        converted: dict[str, Any] = super().from_hf(theirs)
        return converted

    def _rotated(self, state_dict: dict[str, Any]) -> list[tuple[str, int]]:
        """List the factors whose rows are rotated, with their numbers of heads."""
        args = self.llama_args
        queries = [(name, args.n_heads) for name in state_dict if name.endswith("q_proj.B.weight")]
        keys = [(name, args.kv_heads) for name in state_dict if name.endswith("k_proj.B.weight")]
        return queries + keys


def merge_factors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace pairs ``*.A.weight`` (r, d_in), ``*.B.weight`` (d_out, r) by ``*.weight`` = B A."""
    # Multiplied in fp32 or better, in the factors' dtype.
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
