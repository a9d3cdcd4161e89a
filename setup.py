# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The one step that pyproject.toml cannot say: which files beside the package a wheel contains.

``train_configs/`` and ``scripts/`` stay at the repository's top, where users type their paths. A
wheel has them inside the package, where `torchtitan_lr.config.shipped` looks first.

setuptools can map a package to another folder with ``package-dir``, but ``packages.find`` does not
find a mapped package: all packages would have to be listed by hand. In an editable installation the
mapping would also be fixed to one checkout, whichever checkout ``PYTHONPATH`` names.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACKAGE = "torchtitan_lr"

BESIDE = {
    "train_configs": "*.toml",
    "train_configs/experiments": "*.toml",
    "scripts": "*.py",
    "scripts/hardware": "*.toml",
}
OWN = ("check_env.py", "check_smoke.py")  # parts of the checkout's shell scripts


def files_beside() -> list[str]:
    """Return the paths of the files, relative to this folder."""
    found = [path for folder, pattern in BESIDE.items() for path in Path(folder).glob(pattern)]
    return sorted(path.as_posix() for path in found if path.name not in OWN)


class BuildWithFilesBeside(build_py):
    """Copy the files beside the package into it, except in an editable installation."""

    def run(self) -> None:
        """Build the package, then copy the files."""
        super().run()
        for source, target in self._targets().items():
            self.mkpath(str(Path(target).parent))
            self.copy_file(source, target)

    def get_source_files(self) -> list[str]:
        """Return the sources of the package, these files included, for the sdist."""
        return [*super().get_source_files(), *files_beside()]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the files that this step writes."""
        return [*super().get_outputs(include_bytecode), *self._targets().values()]

    def _targets(self) -> dict[str, str]:
        if self.editable_mode:
            return {}
        return {path: str(Path(self.build_lib, PACKAGE, path)) for path in files_beside()}


setup(cmdclass={"build_py": BuildWithFilesBeside})
