# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a step costs: memory, messages and time of a run, from its configuration.

`tp_messages`, `gram_messages` and `tsr_messages` state a step on paper and import nothing that
runs; the ledger is compared with them.
"""
