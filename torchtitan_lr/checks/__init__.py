# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Checks that refuse an invalid configuration before any rank starts."""
