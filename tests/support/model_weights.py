# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The weights of a model in memory, as the exports read those of a checkpoint."""

from torchtitan_lr.models.configured import model_shapes


class ModelWeights:
    def __init__(self, model):
        self.model = model
        self.args = model.model_args
        self.shapes = model_shapes(self.args)
        self.dtype = next(model.parameters()).dtype

    def read(self, names):
        state = self.model.state_dict()
        return {name: state[name] for name in names}
