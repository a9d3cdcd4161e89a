# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The LLaMA model of every family, made of blocks; no code here knows of ranks or meshes."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchtitan_lr.models.args import LlamaArgs
from torchtitan_lr.models.block import Latents, TransformerBlock
from torchtitan_lr.models.documents import separate
from torchtitan_lr.models.ends import EmbedEdge, HeadEdge, OutputProjection, TokenEmbedding
from torchtitan_lr.models.initialization import init_parameters
from torchtitan_lr.models.lanes import LaneEmbedEdge
from torchtitan_lr.models.rope import build_freqs_cis
from torchtitan_lr.titan.base import ModelProtocol

if TYPE_CHECKING:
    from torchtitan_lr.inference.cache import KeyValueCache


class LlamaModel(ModelProtocol):
    """LLaMA of any family, or the part of a pipeline stage.

    A stage has ``tok_embeddings``, ``norm`` or ``output`` set to None and layers removed, as
    torchtitan's ``pipeline_llm`` leaves it.
    """

    freqs_cis: Tensor

    def __init__(self, model_args: LlamaArgs) -> None:
        super().__init__(model_args)
        model_args.check()
        self.model_args = model_args
        dim, vocab_size = model_args.dim, model_args.vocab_size
        # The low-rank families have lanes in their latents, and one stream.
        lanes = model_args.lanes if not model_args.low_rank else 1
        embed = EmbedEdge() if lanes == 1 else LaneEmbedEdge(lanes=lanes)
        head = HeadEdge(stream="replicated" if lanes == 1 else "lanes")
        self.tok_embeddings: nn.Module | None = TokenEmbedding(vocab_size, dim, embed)
        self.layers = nn.ModuleDict(
            {str(i): TransformerBlock(i, model_args) for i in range(model_args.n_layers)}
        )
        self.norm: nn.Module | None = nn.RMSNorm(dim, eps=model_args.norm_eps)
        self.output: nn.Module | None = OutputProjection(dim, vocab_size, head)
        self.register_buffer("freqs_cis", self._build_freqs_cis(), persistent=False)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Draw the initial weights and fill the rotary table."""
        with torch.device(buffer_device or self.freqs_cis.device):
            self.freqs_cis = self._build_freqs_cis()
        init_parameters(self, self.model_args)

    def forward(
        self,
        tokens: Tensor,
        *carried: Tensor,
        cache: "KeyValueCache | None" = None,
        documents: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Predict the next token at every position.

        Args:
            tokens: Token ids (b, s); in a later pipeline stage, the residual stream (b, s, d).
            *carried: LaX in a later pipeline stage: the seven latents sent by the stage before.
            cache: Keys and values of the tokens before these; None if there are none.
            documents: Index of each token's document (b, s), on every pipeline stage; None for one
                document per row. Documents do not see each other (`models.documents`).
            targets: Token ids (b, s) whose log-probabilities are summed, on every pipeline stage.
                A head that gathers its logits over the ranks does not use them.

        Returns:
            Logits (b, s, V), with a cache of the last position alone, (b, 1, V); with targets
            instead the scalar sum of -log p(target), without whole logits (`models.head_loss`). In
            an earlier pipeline stage, the residual stream (b, s, d), with lanes at full rank
            (b, s, G, d), for LaX followed by the last block's latents.
        """
        x = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        latents: Latents | None = carried or None
        table = torch.view_as_real(self.freqs_cis)
        # Arguments that are not given at all let a compiled block keep its one graph.
        options: list[dict[str, Any]] = [{} for _ in self.layers]
        if documents is not None:
            if cache is not None:
                raise ValueError("a cache holds one document per row")
            positions, mask = separate(documents, x.dtype)
            table, options = table[positions], [{"mask": mask} for _ in self.layers]
        elif cache is not None:
            table = cache.begin(table, tokens.shape[1])
            options = [{"cache": cache.layer(index)} for index in range(len(self.layers))]
        for block, option in zip(self.layers.values(), options, strict=True):
            x, latents = block(x, table, latents, **option)
        if cache is not None:
            x = x[:, -1:]  # generation reads no other prediction
        if self.output is not None:
            out: Tensor = self.output(x, self.norm, targets)
            return out
        return x if latents is None else (x, *latents)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LlamaModel":
        # A cast would round the rotary table (or drop its imaginary part), and materializing a
        # meta model would leave it unfilled: so the table is rebuilt, not converted.
        device = fn(torch.empty(0, device=self.freqs_cis.device)).device
        self.freqs_cis = None  # type: ignore[assignment]
        super()._apply(fn, recurse)
        with torch.device(device):
            self.freqs_cis = self._build_freqs_cis()
        return self

    def _build_freqs_cis(self) -> Tensor:
        args = self.model_args
        parameter = next(self.parameters(), None)
        dtype = torch.float32 if parameter is None else parameter.dtype
        return build_freqs_cis(
            args.head_dim,
            args.max_seq_len,
            args.rope_theta,
            args.rope_scaling,
            torch.promote_types(dtype, torch.float32),
        )
