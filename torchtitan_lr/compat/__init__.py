# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""All uses of private torch API: names, patches and copied tables.

Every private name (a leading underscore in a module, an attribute or a function), every patch of
upstream's objects and every copied table is in this folder, behind a public name. Its docstring
gives the reason, the tested versions, and what fails if upstream changes; where it names nothing,
the import or the first use raises an ImportError or AttributeError.
``tests/unit/compat`` tests every public name and fails on private names elsewhere in
the package. torchtitan's are in ``torchtitan_lr/titan``.
"""
