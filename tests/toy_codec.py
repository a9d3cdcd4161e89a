# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A gradient codec from outside the package: ``strided``.

Each rank sends k entries at equal distances, the same ones on every rank and others with every
exchange, so that no index is needed. A run names this module by ``experimental.custom_import``.
"""

import torch

import torchtitan_lr.training.register  # noqa: F401  # the models, as the default module does
from torchtitan_lr.compression.codecs import Codec, Decoded, Message, register_codec
from torchtitan_lr.compression.codecs.sparsify import left_over
from torchtitan_lr.compression.sizes import VALUE_BYTES, kept_entries
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.formulas.compression import CodecFormula, register_formula, sent_entries
from torchtitan_lr.formulas.traffic import Traffic


@register_codec
class StridedCodec(Codec):
    name = "strided"

    def __init__(self, theta):
        self.theta = theta

    @classmethod
    def resolve(cls, section, c, theta, ranks):
        if theta < 0.5:
            raise ConfigError("grad_compression.theta", theta, "at least 0.5 with strides")
        return super().resolve(section, c, theta, ranks)

    @classmethod
    def build(cls, sizes, ranks):
        return cls(sizes.theta)

    def message_bytes(self, m):
        return {"values": VALUE_BYTES * kept_entries(m, self.theta)}

    def bits(self):
        return {"values": 32 * (1 - self.theta)}

    def encode(self, rows, seed):
        positions = self.positions(rows.shape[1], seed).expand(len(rows), -1)
        values = rows.gather(1, positions)
        return Message(summed={"values": values}, positions=positions, values=values)

    def decode(self, received, m, seed):
        values = received["values"]
        return Decoded(values.new_zeros(m).index_copy_(0, self.positions(m, seed), values))

    def unsent(self, rows, message, verdicts):
        return left_over(rows, message.positions, message.values)

    def positions(self, m, seed):
        k = kept_entries(m, self.theta)
        return (torch.arange(k) * (m // k) + seed) % m


class StridedFormula(CodecFormula):
    def rows(self, exchange, codec, scope, mesh_dim):
        values = sent_entries(exchange.compressed, codec.theta)
        elements = exchange.ranks * (values + exchange.dense)
        return [Traffic(scope, "backward", "reduce_scatter", "gradient", 1, elements, mesh_dim)]


register_formula("strided", StridedFormula())
