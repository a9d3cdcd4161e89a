# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Numbers printed in the papers, for comparison; nothing here is computed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BoostRun:
    """A bar group of BOOST's Figure 6 (left), on A100-80G GPUs, with seconds read off the figure.

    Args:
        flavor: Our flavor with the paper's shape.
        tensor_parallel: Degree T.
        pipeline_parallel: Pipeline stages.
        full: Seconds of an iteration at full rank.
        vanilla: Seconds of the vanilla plan, with every head on every rank.
        boost: Seconds of the bottleneck-aware plan.
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

BOOST_LOGGED_SECONDS = {
    ("3B", 1): (0.33643, 0.38414, 0.25543),
    ("3B", 4): (1.12, 1.31, 0.79471),
    ("7B", 1): (0.36757, 0.43329, 0.28271),
    ("7B", 4): (1.13, None, 0.76586),
}
"""Logs in the repository of BOOST's authors (github.com/Arcana-2236/BOOST, ``.logging``), by flavor
and batch: full rank, vanilla, BOOST; as in Figure 6 but with fp32 gradients and master weights.
The vanilla run of 7B at batch 4 recomputes its blocks, so that it is left out."""

BOOST_LINEAR_MS = {
    ("3B", 4): (0.345, 0.849, 0.281, 0.487, 0.207, 0.338),
    ("7B", 4): (0.566, 1.488, 0.358, 0.654, 0.303, 0.539),
    ("13B", 4): (0.791, 2.202, 0.543, 0.978, 0.447, 0.839),
}
"""The same logs, T = 4, by flavor and batch: milliseconds of a d×d linear and of a d×d_ff one, at
full rank, under vanilla and under BOOST; in the last two cases each is two products."""

BOOST_LINEAR_UTILIZATION = {
    1: (73.4, 77.5, 48.1, 52.6, 55.1, 64.9),
    2: (77.0, 79.6, 56.8, 59.0, 69.7, 69.9),
    8: (84.0, 81.6, 65.7, 64.1, 76.1, 76.6),
}
"""The same linears of 7B, by batch: percent of the peak of 312 TFLOP/s."""

BOOST_ALL_REDUCES = {
    ("3B", 4): ((192, 1.542), (992, 7.496), (168, 1.453)),
    ("13B", 4): ((320, 2.462), (1664, 12.087), (280, 2.276)),
    ("7B", 1): ((64, 0.569), (332, 2.644), (56, 0.613)),
    ("7B", 2): ((128, 1.070), (664, 5.028), (112, 1.035)),
    ("7B", 4): ((256, 1.986), (1328, 9.713), (224, 1.859)),
    ("7B", 8): ((512, 3.826), (2656, 19.000), (448, 3.484)),
}
"""The same logs, T = 4, by flavor and batch: MiB and milliseconds of a block's all-reduces in a
pass: two at full rank, seven under vanilla, seven under BOOST."""

TORCHTITAN_8B = {(8, True): 6667, (8, False): 5762, (128, True): 6514, (128, False): 5605}
"""torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, Tables 1 and 3: tokens per second and
GPU of Llama 3.1 8B under FSDP, by GPUs and whether compiled; 2 sequences of 8192 tokens a GPU,
selective checkpointing of operators."""

BOOST_SHAPES = {
    "1B_boost": (24, 32, 2048, 5472, 512),
    "3B": (28, 24, 3072, 8192, 768),
    "7B": (32, 32, 4096, 11008, 1024),
    "13B": (40, 40, 5120, 13824, 1280),
    "30B": (36, 64, 8192, 22016, 2048),
}
"""BOOST, Table 8, by flavor: layers, heads, d, d_ff, r."""

BOOST_VOLUME_GIB = {"megatron": 0.25, "vanilla_replicated": 1.32, "btp": 0.22}
"""BOOST, Figure 8 (left): GiB per block and pass, 7B, b = 4, s = 4096, by plan."""

COLA_TABLE_5 = {
    "60M": (("58", "0.43"), ("43", "0.32")),
    "130M": (("134", "1.00"), ("94", "0.70")),
    "350M": (("368", "2.74"), ("185", "1.38")),
    "1B": (("1339", "9.98"), ("609", "4.54")),
}
"""CoLA, Table 5: parameters in millions and memory in "GB" (which are GiB), full rank and CoLA."""

COLA_TABLE_7 = {"60M": "0.4", "130M": "0.5", "350M": "0.4"}
"""CoLA, Table 7: FLOPs of CoLA at its default rank over those of full rank."""

COLA_TABLE_7_MORE = "0.7"
"""CoLA, Table 7: the same at larger ranks, which are not printed."""

COLA_BERT_LARGE = (1024, 4096, 384, 512)
"""CoLA, Appendix D.2: d and d_ff of BERT-Large, and the ranks of its attention and feed-forward at
0.7 times its FLOPs."""

COLA_TABLE_9_FLOPS = {
    "1B": {"GCP": "1.68", "CoLA": "0.40", "CoLA-M": "0.55"},
    "7B": {"GCP": "1.67", "CoLA": "0.40", "CoLA-M": "0.54"},
}
"""CoLA, Table 9: FLOPs over those of full rank, n = 256."""

COLA_RECOMPUTATION = "4.6"
"""CoLA, Figure 7 and section 4.2: GCP's recomputation of a 1B block over CoLA-M's."""

BOOST_TABLE_4 = {"weights": "1.25", "gradients": "1.25", "optimizer": "2.50"}
"""BOOST, Table 4: "GB" (which are GiB) on each of four ranks, CoLA 7B, both plans."""

BOOST_TABLE_5 = {
    ("Vanilla", 4): (26022, 229, "113.7"),
    ("BOOST", 4): (17414, 90, "193.5"),
    ("Vanilla", 8): (52280, 460, "113.6"),
    ("BOOST", 8): (35392, 200, "177.0"),
}
"""BOOST, Table 5, by plan and batch: MB that checkpointing saves, ms that it costs, their ratio."""

BOOST_TABLE_5_TIMES = {4: "1.70", 8: "1.56"}
"""BOOST, section 5: BOOST's ratio over vanilla's, by batch."""

BOOST_INTENSITY_7B = {"vanilla over full rank": 0.2, "btp over vanilla": 2.5}
"""BOOST, section 4.1: ratios of arithmetic intensity that the text names for the MLP of 7B."""

COLA_H100_1B = {"full": (12365, 69.84), "GCP": (8799, 14.89), "CoLA": (22979, 66.46)}
COLA_H100_1B["CoLA-M"] = (16617, 17.33)
"""CoLA, Table 9: tokens per second and GB on an H100, 1B, 64 sequences of 256 tokens."""

TSR_CELLS = {
    ("60M", 256, 64, 100): ("0.020", "0.10", "0.17"),
    ("130M", 384, 96, 100): ("0.058", "0.31", "0.45"),
    ("350M", 384, 128, 100): ("0.11", "0.79", "1.19"),
    ("1B", 512, 256, 100): ("0.21", "2.05", "3.81"),
    ("60M", 128, 64, 200): ("0.008", "0.05", "0.14"),
    ("130M", 256, 96, 50): ("0.032", "0.20", "0.38"),
    ("350M", 256, 128, 50): ("0.062", "0.52", "1.02"),
}
"""TSR-Adam, Tables 3 and 6 (its 40k-step row repeats the first), by model, r, r_e and K: decimal
GB per step on average, peak GB per step, and GB of memory."""

TSR_ADAMW_CELLS = {
    "60M": ("0.17", "0.17", "0.28"),
    "130M": ("0.44", "0.44", "0.71"),
    "350M": ("1.34", "1.34", "2.08"),
    "1B": ("5.09", "5.09", "7.77"),
}
"""AdamW in the same tables."""

TSR_GALORE_MEMORY = {
    "60M": (128, "0.21"),
    "130M": (256, "0.51"),
    "350M": (256, "1.26"),
    "1B": (512, "4.5"),
}
"""GaLore's rank and memory in these tables. We found no formula for its bytes and peaks."""

TAGC_BITS = (5.2, 6.15)
"""TAGC, section 3 and Figure 2: bits per parameter at 10x with a 1-bit index, and 32 over it."""

TSR_TABLE_4 = {"Adam": ("494M", 86.28), "GaLore": ("158M", 85.17), "TSR": ("20M", 85.54)}
"""TSR-Adam's Table 4, RoBERTa-Base fine-tuned on GLUE: bytes per step, and the mean score of eight
tasks in percent."""
