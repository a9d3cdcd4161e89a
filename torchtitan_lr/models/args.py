# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The definition of a model: one dataclass, checked as a whole, filled from the configuration."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from torchtitan_lr.config.schema import ITS_MODULE, vocabulary_rows
from torchtitan_lr.errors import one_of, require
from torchtitan_lr.models.families import FAMILIES, ModelFamily
from torchtitan_lr.titan.base import BaseModelArgs
from torchtitan_lr.titan.specs import RoPEScalingArgs

Activation = Literal["both", "lowrank", "reduced", "fullrank", "none"]
LaxGate = Literal["identity", "scalar"]
BackwardSum = Literal["float32", "activation"]

_LARGEST = 1 << 24  # of any size of a model, and of positions


@dataclass
class LlamaArgs(BaseModelArgs):
    """Shape and kind of a LLaMA, full-rank or factorised; values that do not fit are refused."""

    family: str = "cola"  # one of `FAMILIES`
    dim: int = 256  # width d of the residual stream
    n_layers: int = 4  # decoder blocks L
    n_heads: int = 8  # query heads, dim / n_heads wide
    n_kv_heads: int | None = None  # heads of keys and values (grouped queries); None is n_heads
    ffn_dim: int = 688  # hidden width f of the SwiGLU
    vocab_size: int = 32000  # rows of the embedding and of the head, which are never tied
    norm_eps: float = 1e-6  # added to the mean square in every RMSNorm
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_scaling: RoPEScalingArgs | None = None  # of Llama 3.1
    max_seq_len: int = 2048  # positions in the rotary table; the job's training.seq_len
    rank_attention: int = 64  # r of wq, wk, wv, wo, at most d; 0 at full rank
    rank_ffn: int = 64  # r of w1, w2, w3; 0 at full rank
    # Where the nonlinearities sit (CoLA, Table 10): ``both``, only in the bottlenecks
    # (``lowrank``), only in the gate's bottleneck (``reduced``), only SwiGLU's own (``fullrank``),
    # or nowhere (``none``). Without meaning at full rank.
    activation: Activation = "both"
    lax_gate: LaxGate = "identity"  # on the carried latent: 1, or a learned scalar (1,) each
    init_seed: int = 0  # of the initial weights
    # CAAT-Net: number G of streams that share only a part of what they add; 1 but at full rank.
    lanes: int = 1
    sync_fraction: float = 1.0  # CAAT-Net's p: all lanes sum the first int(p · width) channels
    # CAAT-Net: in which backward adds the lanes' gradients of half precision up.
    backward_sum: BackwardSum = "float32"

    @property
    def model_family(self) -> ModelFamily:
        """The family, which says what a linear becomes."""
        return FAMILIES[self.family]

    @property
    def learns_gates(self) -> bool:
        """Whether the linears of all blocks but the first have a learned factor g."""
        return self.model_family.gated and self.lax_gate == "scalar"

    def latent_silu(self, projection: str) -> bool:
        """Whether σ acts in the bottleneck of ``projection`` (one of q k v o gate up down)."""
        if self.activation == "reduced":
            return projection == "gate"
        return self.activation in ("both", "lowrank")

    def shared_channels(self, width: int) -> int:
        """Return the number of first channels, of ``width``, that the lanes sum: int(p · width)."""
        return int(self.sync_fraction * width)

    def check(self) -> None:
        """Check every value alone and against the others (ConfigError), and derive what follows."""
        self._check_values()
        # No fields, since they follow from the fields, and files hold those alone.
        self.low_rank = self.model_family.low_rank
        self.head_dim = self.dim // self.n_heads
        self.kv_heads = self.n_heads if self.n_kv_heads is None else self.n_kv_heads
        self.kv_dim = self.kv_heads * self.head_dim  # output width of wk and wv
        # Whether SwiGLU keeps its own SiLU on the gate.
        self.outer_silu = not self.low_rank or self.activation in ("both", "fullrank")
        self.model_family.check(self)
        want = f"a divisor of the model's width {self.dim} that leaves an even head width"
        fits = self.dim % self.n_heads == 0 and self.head_dim % 2 == 0
        require(fits, "model.n_heads", self.n_heads, want)
        want = f"a divisor of the {self.n_heads} query heads"
        require(self.n_heads % self.kv_heads == 0, "model.n_kv_heads", self.n_kv_heads, want)
        for sublayer in ("attention", "ffn") if self.low_rank else ():
            rank = getattr(self, f"rank_{sublayer}")
            self._check_rank(sublayer, f"low_rank.rank_{sublayer}", rank)
        self._check_lanes()

    def _check_values(self) -> None:
        for key, value, choices in (
            ("low_rank.activation", self.activation, get_args(Activation)),
            ("low_rank.lax_gate", self.lax_gate, get_args(LaxGate)),
            ("caat.backward_sum", self.backward_sum, get_args(BackwardSum)),
        ):
            require(value in choices, key, value, one_of(choices, value))
        want = f"{one_of(FAMILIES, self.family)}, or {ITS_MODULE}"
        require(self.family in tuple(FAMILIES), "model.name", self.family, want)
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
        values = {f"model.{name}": getattr(self, name) for name in sizes}
        values["training.seq_len"] = self.max_seq_len
        # Bytes of a product of two fit in 64 bits, and the rotary table has gigabytes.
        want = f"a positive integer of at most {_LARGEST:,}"
        for key, value in values.items():
            fits = type(value) is int and 0 < value <= _LARGEST
            require(fits or (key, value) == ("model.n_kv_heads", None), key, value, want)
        scaling = {} if self.rope_scaling is None else vars(self.rope_scaling)
        numbers = {"norm_eps": self.norm_eps, "rope_theta": self.rope_theta} | scaling
        for name, value in numbers.items():
            fits = type(value) in (int, float) and 0 <= value < math.inf
            require(fits, f"model.{name}", value, "a finite number of at least 0")
        # The rotary table divides by its powers.
        require(self.rope_theta > 0, "model.rope_theta", self.rope_theta, "a positive number")

    def _check_lanes(self) -> None:
        lanes, fraction = self.lanes, self.sync_fraction
        want = "1 (an ordinary model) or more streams"
        require(type(lanes) is int and lanes >= 1, "caat.lanes", lanes, want)
        require(0 <= fraction <= 1, "caat.sync_fraction", fraction, "a number from 0 to 1")
        want = "1 unless caat.lanes is more than 1"
        require(lanes > 1 or fraction == 1, "caat.sync_fraction", fraction, want)
        widths = {"n_heads": self.n_heads, "n_kv_heads": self.kv_heads, "ffn_dim": self.ffn_dim}
        for name, width in (widths | {"vocab_size": self.vocab_size}).items():
            want = f"a divisor of the model's {name} = {width}"
            require(width % lanes == 0, "caat.lanes", lanes, want)

    def __post_init__(self) -> None:
        self.check()

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Apply the job's settings of the model; called once by the trainer."""
        section = job_config.low_rank
        self.model_family.check_overrides(section)
        for sublayer in ("attention", "ffn") if self.low_rank else ():
            # The sublayer's own key wins over the common one; blame the key that the user wrote.
            own = getattr(section, f"rank_{sublayer}")
            key, rank = (f"rank_{sublayer}", own) if own else ("rank", section.rank)
            if rank:
                self._check_rank(sublayer, f"low_rank.{key}", rank)
                setattr(self, f"rank_{sublayer}", rank)
        if section.activation != "flavor":
            self.activation = section.activation
        if self.model_family.gated:
            self.lax_gate = section.lax_gate
        lanes, wanted = job_config.caat, job_config.model.vocab_size
        self.lanes, self.sync_fraction = lanes.lanes, float(lanes.sync_fraction)
        self.backward_sum = lanes.backward_sum
        want = "0 (the flavor's) or a positive integer"
        require(wanted >= 0, "model.vocab_size", wanted, want)
        if wanted:
            degree = job_config.parallelism.tensor_parallel_degree
            self.vocab_size = vocabulary_rows(wanted, degree, self.lanes)
        self.max_seq_len = job_config.training.seq_len
        seed = job_config.debug.seed
        self.init_seed = 0 if seed is None else seed
        self.check()

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Count the parameters of a whole model, and the FLOPs per token of a step, for MFU."""
        # A product with a weight or with the keys or values costs 2 FLOPs per entry, and backward
        # repeats it for the gradient of each operand. Causal attention counts in full: each token
        # uses the keys and values of all ``seq_len`` tokens, in every head.
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        products = sum(linear.weight.numel() for linear in linears)
        products += self.n_layers * 2 * seq_len * self.dim
        return sum(parameter.numel() for parameter in model.parameters()), 3 * 2 * products

    def _check_rank(self, sublayer: str, key: str, rank: int) -> None:
        # Narrow k and v do not count: grouped queries make them narrower than q and o, and CoLA's
        # r = d/4 can exceed their width. With σ in the bottleneck such a rank has a meaning.
        largest = self.dim if sublayer == "attention" else min(self.dim, self.ffn_dim)
        want = f"a rank from 1 to {largest}, the smallest side of these projections"
        require(type(rank) is int and 0 < rank <= largest, key, rank, want)
