# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""All uses of private torch API: names, patches and copied tables, behind public names.

A docstring or comment gives the reason and what fails if upstream changes: else the import or the
first use raises an ImportError or AttributeError. torchtitan's are in ``torchtitan_lr/titan``.
"""
