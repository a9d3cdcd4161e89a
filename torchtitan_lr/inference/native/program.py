# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The list of operations of a decoding step, written once per batch.

A step of one token per row has few products per byte of weights, so that the time goes into memory
and into what stands between the products. The whole step is therefore one call: its threads walk
through one list of operations, and meet only where one of them needs the others' results. Products
that share nothing (q, k, v; the heads' B of a latent cache) run without a meeting in between; σ,
the gate and the residual sum are the end of a product. Attention reads the columns that a row has,
and the most likely token is chosen by the same call.

`NativeModel` packs the weights once; `Step` belongs to one batch and its cache.
"""

import ctypes
import time
from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.inference.cache import KeyValueCache, LatentLayerCache
from torchtitan_lr.inference.native.build import load_library
from torchtitan_lr.inference.native.look_ahead import Kind, look_ahead
from torchtitan_lr.inference.native.packing import (
    CODES,
    TOGETHER,
    VECTOR_BYTES,
    Op,
    pack,
    pack_bounds,
    pack_codes,
    pack_together,
    panel_size,
)
from torchtitan_lr.inference.screened_head import ScreenedHead
from torchtitan_lr.models.block import Attention, FeedForward, TransformerBlock
from torchtitan_lr.models.families.lax import MixEdge
from torchtitan_lr.models.layers import DenseEdge, DownEdge, HeadEdge, LowRankLinear, UpEdge
from torchtitan_lr.models.llama import LlamaModel

_TRIALS = 6
"""Steps in which both ways are timed: one that is held up decides nothing."""

_RUNS = {torch.float32: "run_float", torch.float64: "run_double"}

_EDGES = (DenseEdge, DownEdge, UpEdge, HeadEdge, MixEdge, ScreenedHead)


class _Ending(IntEnum):
    """What a product does with its result: y = Wx, σ(Wx), y + Wx or y · Wx."""

    STORE = 0
    SILU = auto()
    ADD = auto()
    MULTIPLY = auto()


class NativeModel:
    """A model's weights, packed for `Step`; a copy beside the model's own.

    Args:
        model: A model of any family in one process on a CPU, in fp32 or fp64, without lanes.

    Raises:
        ConfigError: A model of another kind, or no compiler.
    """

    def __init__(self, model: LlamaModel) -> None:
        dtype = next(model.parameters()).dtype
        if dtype not in _RUNS:
            raise ConfigError("--native", str(dtype), "weights in float32 or float64")
        if model.freqs_cis.device.type != "cpu":
            raise ConfigError("--native", model.freqs_cis.device.type, "--device cpu")
        edges = [
            child
            for module in model.modules()
            if isinstance(module, Attention | FeedForward | nn.Linear)
            for child in module.children()
            if not isinstance(child, LowRankLinear | nn.Linear)
        ]
        for edge in edges:
            if type(edge) not in _EDGES:
                want = "no such option: the model has lanes, or is split or compiled"
                raise ConfigError("--native", type(edge).__name__, want)
        self.model, self.dtype = model, dtype
        self.run = getattr(load_library(), _RUNS[dtype])
        self.run.restype = None
        self.run.argtypes = (ctypes.c_void_p, *(ctypes.c_int64,) * 3, ctypes.c_int)
        linears = [module for module in model.layers.modules() if isinstance(module, nn.Linear)]
        packed = pack_together([linear.weight for linear in linears])
        self.packed = {id(linear): part for linear, part in zip(linears, packed, strict=True)}
        self.head = cast(nn.Linear, model.output)
        screened = self.head.head
        self.screen: tuple[Tensor, Tensor] | None = None
        if isinstance(screened, ScreenedHead) and self.head.in_features % TOGETHER == 0:
            columns = screened.scale, screened.weight_error, screened.code_norm
            self.screen = pack_codes(screened.codes), pack_bounds(*columns)
        else:
            self.packed[id(self.head)] = pack(self.head.weight)


class Step:
    """The decoding step of one batch, after its prompts were read.

    Args:
        native: The packed model.
        cache: The batch's cache, which holds the prompts.
        tokens: Ids of the last tokens (b,); the step replaces them by the most likely next ones.
        greedy: Whether it does. Otherwise `hidden` gets the normed residual stream.

    Attributes:
        hidden: Residual stream after the final norm (b, d).
    """

    def __init__(
        self, native: NativeModel, cache: KeyValueCache, tokens: Tensor, greedy: bool
    ) -> None:
        self._native, self._cache, self._batch = native, cache, len(tokens)
        self._threads = torch.get_num_threads()
        self._ops: list[Op] = []
        self._held: list[Tensor] = []  # what the operations point to
        self._buffers: dict[tuple[str | int, ...], Tensor] = {}
        self._carried: list[Tensor] | None = None
        model = native.model
        args = model.model_args
        d = args.dim
        self._x, self._normed, self._attended = (self._new(d) for _ in range(3))
        self._padding = torch.tensor(cache.padding, dtype=torch.int64)
        self._table = torch.view_as_real(model.freqs_cis).to(native.dtype).contiguous()
        self._scores = torch.zeros(
            (self._threads, args.n_heads, cache.capacity + VECTOR_BYTES // native.dtype.itemsize),
            dtype=native.dtype,
        )
        self._held += [tokens, self._padding, self._table, self._scores]
        embedding = cast(nn.Embedding, model.tok_embeddings)
        self._add(Kind.EMBED, (tokens, embedding.weight, self._x), (d,))
        for index, block in enumerate(model.layers.values()):
            self._block(cast(TransformerBlock, block), index)
        self._norm(cast(nn.RMSNorm, model.norm))
        self.hidden = self._normed
        if greedy:
            self._head(tokens)
        self._lists = [self._ended(0), self._ended(len(model.layers))]
        self._seconds: list[float] = []

    def __call__(self) -> None:
        """Read the present tokens and compute the next ones.

        Whether fetching caches saves time depends on the processor's own caches. The first steps
        are computed both ways in turn, the others in the faster way. The results are the same.
        """
        column = self._cache.advance()
        ops = self._lists[len(self._seconds) % len(self._lists)]
        begin = time.perf_counter()
        self._native.run(ctypes.addressof(ops), len(ops), self._batch, column, self._threads)
        if len(self._lists) > 1:
            self._seconds.append(time.perf_counter() - begin)
            if len(self._seconds) == _TRIALS:
                plain, fetching = (min(self._seconds[way::2]) for way in (0, 1))
                self._lists = [self._lists[fetching < plain]]

    def _ended(self, fetches: int) -> ctypes.Array[Op]:
        """Return the operations as the library reads them; ``fetches`` as in `look_ahead`."""
        look_ahead(self._ops, self._batch, fetches, self._native.dtype.itemsize)
        return (Op * len(self._ops))(*self._ops)

    def _new(self, width: int, dtype: torch.dtype | None = None, rows: int = 0) -> Tensor:
        buffer = torch.zeros((rows or self._batch, width), dtype=dtype or self._native.dtype)
        self._held.append(buffer)
        return buffer

    def _shared(self, width: int, *name: str | int) -> Tensor:
        """Return a buffer of rows (b, width) that all blocks use, and so remains in L2."""
        key = (width, *name)
        if key not in self._buffers:
            self._buffers[key] = self._new(width)
        return self._buffers[key]

    def _add(
        self,
        kind: Kind,
        pointers: Sequence[Tensor | None],
        numbers: Sequence[int],
        factor: float = 0.0,
        wait: bool = True,
        turn: int = 0,
    ) -> None:
        addresses = tuple([None if tensor is None else tensor.data_ptr() for tensor in pointers])
        self._ops.append(Op(kind, wait, turn, addresses, tuple(numbers), (factor,)))

    def _linear(
        self,
        x: Tensor,
        weight: Tensor,
        y: Tensor,
        size: int,
        ending: _Ending = _Ending.STORE,
        each: int = 0,
        **extra: Any,
    ) -> None:
        """Add y (b, N) = x (b, K) times a packed weight; ``each``: outputs per K numbers of x."""
        numbers = (x.stride(0), weight.shape[1], y.stride(0), size, ending, each)
        self._add(Kind.LINEAR, (x, weight, y), numbers, **extra)

    def _norm(self, norm: nn.RMSNorm) -> None:
        numbers = (self._x.shape[1],)
        self._add(Kind.NORM, (self._x, norm.weight, self._normed), numbers, cast(float, norm.eps))

    def _block(self, block: TransformerBlock, index: int) -> None:
        carried, self._raw, self._turn = self._carried, cast("list[Tensor]", []), index % 2
        attention, ffn = block.attention, block.feed_forward
        self._norm(block.attention_norm)
        q, k, v = (
            self._shared(_width(linear), name)
            for name, linear in zip("qkv", _qkv(attention), strict=True)
        )
        latent = isinstance(self._cache.layer(index), LatentLayerCache)
        if latent:
            v = self._shared(cast(LowRankLinear, attention.wv).B.in_features, "latent of v")
        self._group(
            self._normed,
            _qkv(attention),
            (q, k, v),
            getattr(attention, "silu_qkv", ()),
            (_Ending.STORE,) * 3,
            carried and carried[:3],
            mixes=_mixes(attention),
            kept=2 if latent else 3,
        )
        self._attend(attention, index, q, k, v)
        silu = getattr(attention, "silu_o", ())
        self._group(
            self._attended,
            [attention.wo],
            [self._x],
            silu,
            (_Ending.ADD,),
            carried and carried[3:4],
            mixes=_mixes(attention),
        )
        self._norm(block.ffn_norm)
        hidden = self._shared(_width(ffn.w1), "hidden")
        gate = _Ending.SILU if ffn.outer_silu else _Ending.STORE
        self._group(
            self._normed,
            [ffn.w1, ffn.w3],
            [hidden, hidden],
            getattr(ffn, "silu_gate_up", ()),
            (gate, _Ending.MULTIPLY),
            carried and carried[4:6],
            mixes=_mixes(ffn),
            turn_each=False,  # a thread multiplies the part of the gate that it wrote
        )
        silu = getattr(ffn, "silu_down", ())
        self._group(
            hidden,
            [ffn.w2],
            [self._x],
            silu,
            (_Ending.ADD,),
            carried and carried[6:],
            mixes=_mixes(ffn),
        )
        self._carried = self._raw if block.carries_latents else None

    def _group(
        self,
        x: Tensor,
        linears: Sequence[nn.Module],
        outs: Sequence[Tensor],
        use_silu: Sequence[bool],
        endings: Sequence[_Ending],
        carried: Sequence[Tensor] | None,
        mixes: bool,
        kept: int = 7,
        turn_each: bool = True,
    ) -> None:
        """Add a group of linears of one input.

        Args:
            x: Input (b, d_in).
            linears: The group, full-rank or factorised.
            outs: Output of each (b, d_out).
            use_silu: Whether each has σ in its bottleneck; unused at full rank.
            endings: What each does with its result.
            carried: The previous block's latents, if any.
            mixes: Whether latents pass from block to block.
            kept: How many of the group apply B; of the others the latent is the output.
            turn_each: Whether the threads' shares rotate within the group.
        """
        last = len(linears) - 1
        packed = self._native.packed
        if not isinstance(linears[0], LowRankLinear):
            for i, linear in enumerate(linears):
                weight, size = packed[id(linear)], _width(linear)
                turn = i if turn_each else 0
                self._linear(x, weight, outs[i], size, endings[i], wait=i == last, turn=turn)
            return
        factors = [cast(LowRankLinear, linear) for linear in linears]
        latents = []
        for i, linear in enumerate(factors):
            rank = linear.A.out_features
            latent = outs[i] if i >= kept else self._shared(rank, "latent", i)
            # The next block reads this one's.
            turned = len(self._raw), self._turn
            raw = self._shared(rank, "carried", *turned) if mixes else latent
            ending = _Ending.SILU if use_silu[i] and not mixes else _Ending.STORE
            weight = packed[id(linear.A)]
            self._linear(x, weight, raw, rank, ending, wait=i == last, turn=i)
            latents.append(latent)
            self._raw.append(raw)
        for i, linear in enumerate(factors if mixes else ()):
            previous = carried[i] if carried else None
            gate = 1.0 if linear.gate is None else linear.gate.item()
            buffers = (self._raw[i - len(factors)], previous, latents[i])
            numbers = (latents[i].shape[1], int(use_silu[i]))
            self._add(Kind.MIX, buffers, numbers, gate, wait=i == last)
        last = min(last, kept - 1)
        for i, linear in enumerate(factors[:kept]):
            weight, size = packed[id(linear.B)], linear.B.out_features
            turn = i if turn_each else 0
            self._linear(latents[i], weight, outs[i], size, endings[i], wait=i == last, turn=turn)

    def _attend(self, attention: Attention, index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Add attention over the cache, and B after the sum where it holds latents."""
        args, width = self._native.model.model_args, attention.head_dim
        layer = self._cache.layer(index)
        keys, values = cast(Tensor, layer.keys), cast(Tensor, layer.values)
        latent = isinstance(layer, LatentLayerCache)
        groups, rank = keys.shape[1], values.shape[-1]
        mixed = self._shared(args.n_heads * rank, "mixed") if latent else self._attended
        kind = Kind.ATTEND_LATENT if latent else Kind.ATTEND
        buffers = (q, k, v, keys, values, mixed, self._table, self._padding, self._scores)
        numbers = (groups, width, self._cache.capacity, rank, self._scores.shape[-1])
        self._add(kind, buffers, (args.n_heads, *numbers))
        if not latent:
            return
        factor = cast(LowRankLinear, attention.wv).B
        if groups == args.n_heads and width % panel_size(factor.weight) == 0:
            weight = self._native.packed[id(factor)]
            self._linear(mixed, weight, self._attended, factor.out_features, each=width)
            return
        rows = factor.weight.unflatten(0, (groups, width))
        packed = [pack(row) for row in rows]
        self._held += packed
        for head in range(args.n_heads):
            x = mixed[:, head * rank :]
            y = self._attended[:, head * width :]
            weight = packed[head * groups // args.n_heads]
            self._linear(x, weight, y, width, wait=head == args.n_heads - 1, turn=head)

    def _head(self, tokens: Tensor) -> None:
        """Add the choice of the most likely token."""
        native = self._native
        head, size = native.head, native.head.out_features
        if native.screen is None:
            logits = self._new(size)
            self._linear(self._normed, native.packed[id(head)], logits, size)
            self._add(Kind.ARGMAX, (logits, tokens), (size,))
            return
        codes, bounds = native.screen
        width = self._normed.shape[1]
        found = [self._new(width, torch.int8)]
        found += [self._new(1, dtype) for dtype in (*(torch.float32,) * 3, torch.int32)]
        self._add(Kind.QUANTIZE, (self._normed, *found), (width,))
        lowest = self._new(self._batch * CODES, torch.float32, self._threads)
        highest = self._new(len(codes), torch.float32)
        buffers = (*found, codes, bounds, lowest, highest, tokens)
        addresses = (self._normed.data_ptr(), head.weight.data_ptr())
        self._add(Kind.SCREEN, buffers, (width, size, *addresses))
        self._add(Kind.PICK, buffers, (width, size, *addresses))


def _qkv(attention: Attention) -> list[nn.Module]:
    return [attention.wq, attention.wk, attention.wv]


def _width(linear: nn.Module) -> int:
    full = linear.B if isinstance(linear, LowRankLinear) else cast(nn.Linear, linear)
    return full.out_features


def _mixes(module: Attention | FeedForward) -> bool:
    return getattr(module, "mix", None) is not None
