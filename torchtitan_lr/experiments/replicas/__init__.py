# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Replicas that come and go: quorum, healing, and a trainer whose steps are committed."""
