# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""What a step costs; `*_messages` state it on paper, and the ledger is compared with them."""
