# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""List the shipped configurations, or show what a run would use and where each key comes from.

    python scripts/config.py list
    python scripts/config.py show debug_cola
    python scripts/config.py show my.toml --training.steps=100 --changed

CONFIG is a TOML file or the name of a shipped one; --section.key=value overrides it, as in a run.
The output of `show` is a TOML file. Behind each key is its origin:

    default         of this package or of torchtitan
    flavor          of the model's size: model.flavor
    TOML            the file
    command line    an override
    launcher        changed to fit the ranks: NGPU, or the GPUs of this machine

Values of the flavor that no key can change are comments. A configuration that cannot run here is
shown too, with the reason on stderr.

Exit status: 0, or 2 for an invalid configuration.
"""

import argparse
import json
import sys

from torchtitan_lr.commands.parser import OneLineParser, in_one_line


@in_one_line
def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = _parse(argv)
    if options.action == "list":
        from torchtitan_lr.commands.configs import list_as_text, list_configs

        rows = list_configs()
        print(json.dumps(rows, indent=1) if options.json else list_as_text(rows))
        return 0
    from torchtitan_lr.commands.origins import as_toml, read_origins  # late: they need torch

    shown, note = read_origins(options.config, options.overrides)
    if options.changed:
        shown = [setting for setting in shown if setting.origin != "default"]
    print(json.dumps([s.as_dict() for s in shown], indent=1) if options.json else as_toml(shown))
    if note:
        print(note, file=sys.stderr)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("action", choices=["list", "show"], help="list or show")
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="show: a TOML file or a name")
    parser.add_argument("--changed", action="store_true", help="show: leave out the defaults")
    parser.add_argument("--json", action="store_true", help="print a list of rows instead")
    options = parser.parse_with_overrides(argv)
    if options.action == "list" and (options.config or options.overrides):
        parser.error(f"list: got {options.config or options.overrides[0]!r}, expected nothing")
    if options.action == "show":
        if options.config is None:
            parser.error("CONFIG: got nothing, expected a TOML file or a name of `list`")
        parser.check_toml(options.config, "CONFIG")
    return options


if __name__ == "__main__":
    sys.exit(main())
