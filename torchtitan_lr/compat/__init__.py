# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The one door to what is private in torch and torchtitan: names, patches and copied tables.

Every private name (a leading underscore in a module, an attribute or a function), every patch of
upstream's objects and every copied table of the package stands in this folder, behind a public name
whose docstring gives the reason, the versions it was seen in, and what fails when upstream changes.
``tests/unit/compat`` tests every door and refuses a private name anywhere else.
"""
