# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Numbers that the papers print, to compare with; nothing here is computed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BoostRun:
    """A bar group of BOOST's Figure 6 (left), on A100-80G GPUs; seconds read off the figure.

    Args:
        flavor: The model here that has the paper's shape.
        tensor_parallel: Degree T.
        pipeline_parallel: Pipeline stages.
        full: Seconds of an iteration at full rank.
        vanilla: Of the vanilla plan, every head on every rank.
        boost: Of the bottleneck-aware plan.
    """

    flavor: str
    tensor_parallel: int
    pipeline_parallel: int
    full: float
    vanilla: float
    boost: float

    @property
    def ranks(self) -> int:
        """GPUs of the run."""
        return self.tensor_parallel * self.pipeline_parallel


BOOST_ITERATION_SECONDS = (
    BoostRun("1B_boost", 1, 1, 0.85, 0.56, 0.59),
    BoostRun("3B", 2, 1, 1.14, 1.41, 0.78),
    BoostRun("7B", 4, 1, 1.06, 1.64, 0.72),
    BoostRun("13B", 4, 2, 2.07, 2.42, 1.30),
)
"""b = 4 sequences of 4096 tokens, bf16, no recomputation, 10 iterations of which 2 warm up."""

BOOST_SHAPES = {
    "1B_boost": (24, 32, 2048, 5472, 512),
    "3B": (28, 24, 3072, 8192, 768),
    "7B": (32, 32, 4096, 11008, 1024),
    "13B": (40, 40, 5120, 13824, 1280),
    "30B": (36, 64, 8192, 22016, 2048),
}
"""BOOST, Table 8, by flavor: layers, heads, d, d_ff, r."""

BOOST_VOLUME_GIB = {"megatron": 0.25, "vanilla_replicated": 1.32, "btp": 0.22}
"""BOOST, Figure 8 (left): GiB a block and pass, 7B, b = 4, s = 4096, by plan."""

COLA_TABLE_5 = {
    "60M": (("58", "0.43"), ("43", "0.32")),
    "130M": (("134", "1.00"), ("94", "0.70")),
    "350M": (("368", "2.74"), ("185", "1.38")),
    "1B": (("1339", "9.98"), ("609", "4.54")),
}
"""CoLA, Table 5: parameters in millions and memory in "GB" (which are GiB), full rank and CoLA."""

COLA_TABLE_7 = {"60M": "0.4", "130M": "0.5", "350M": "0.4"}
"""CoLA, Table 7: FLOPs of CoLA at its default rank over those of full rank."""

BOOST_INTENSITY_7B = {"vanilla over full rank": 0.2, "btp over vanilla": 2.5}
"""BOOST, section 4.1: ratios of arithmetic intensity that the text names for the MLP of 7B."""
