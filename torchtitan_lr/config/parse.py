# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Strict typing of a TOML file and of command-line overrides against a dataclass tree."""

# Not torchtitan's ConfigManager: it warns of a wrong type and prints a page for a wrong key.
# Not pydantic: its strict mode could replace `_match` and `_parse_text`, but keeps 2 an int where a
# float is declared, and reads "yes" as true. No import of torch: a typo is reported at once.
import difflib
import json
import os
import types
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import tomli

from torchtitan_lr.config.files import read_regular
from torchtitan_lr.config.paths import expanded, near_configs, shipped_config
from torchtitan_lr.errors import ConfigError, one_of, require

CONFIG_FILE_KEY = "job.config_file"

CONFIG_DIR = "${config_dir}"
"""In a string of a TOML file: the file's folder. So the file can be moved with what it names."""

_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list[str]: 'a list of strings such as ["a", "b"], or a,b on the command line',
    list[int]: "a list of integers, in the TOML file",
    list[float]: "a list of numbers, in the TOML file",
    list[list[str]]: "a list of lists of strings, in the TOML file",
}
"""What a key of a type takes, for errors; other types are lists of tables."""


class Override(NamedTuple):
    """One command-line argument: ``--key=value``, ``--key value`` or the flag ``--key``."""

    key: str  # dotted key with dashes turned into underscores, e.g. ``training.local_batch_size``.
    value: str | None  # the text after it; None for a flag


def split_arguments(argv: list[str]) -> list[Override]:
    """Split a command line into overrides, of which a later one wins, without checking keys."""
    overrides, rest = [], list(reversed(argv))
    while rest:
        argument = rest.pop()
        fits = argument.startswith("--") and argument != "--"
        want = "--section.key=value such as --training.steps=100"
        require(fits, "command line", argument, want)
        key, equals, text = argument[2:].partition("=")
        value: str | None = text if equals else None
        if not equals and rest and not rest[-1].startswith("--"):
            value = rest.pop()
        overrides.append(Override(key.replace("-", "_"), value))
    return overrides


def load_toml(path: str) -> dict[str, Any]:
    """Read a TOML file over the one that its key ``include`` names; errors as for `toml_files`."""
    return merge_tables(toml_files(path).values())


def merge_tables(tables: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge tables key by key; a value of a later one, arrays included, replaces that before it."""
    merged: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            known = merged.get(name)
            both = isinstance(known, dict) and isinstance(value, dict)
            merged[name] = merge_tables([known, value]) if both else value  # type: ignore[list-item]
    return merged


def toml_files(path: str) -> dict[str, dict[str, Any]]:
    """Read a TOML file and those that it includes: tables by path, the included ones first.

    ``include`` is a path from the file's folder, or a shipped name.
    """
    found: dict[str, dict[str, Any]] = {}
    file, key = path, CONFIG_FILE_KEY
    while "include" in (values := read_toml(file, key)):
        key, base, folder = f"include of {file}", values.pop("include"), Path(file).parent
        found[file] = values
        named = isinstance(base, str) and base
        require(named, key, base, 'one file, such as include = "base.toml"')
        beside = str(folder / expanded(base, key))
        file = beside if os.path.isfile(beside) else shipped_config(base) or beside
        new = os.path.realpath(file) not in map(os.path.realpath, found)
        require(new, key, base, "a file that does not lead back to this one")
    return dict(reversed((found | {file: values}).items()))


def read_toml(path: str, key: str = CONFIG_FILE_KEY) -> dict[str, Any]:
    """Read one TOML file that a user names by ``key``; errors as for `toml_files`."""
    try:
        text = read_regular(path).decode("utf-8-sig")  # Windows' editors begin with a mark
        return tomli.loads(in_folder(text, Path(path).parent))
    except OSError as error:
        near = near_configs(path)
        hint = f"{error.strerror}; did you mean {near}?" if near else error.strerror
        example = " such as train_configs/debug_cola.toml" if key == CONFIG_FILE_KEY else ""
        want = f"a TOML file{example} ({hint})"
        raise ConfigError(key, path, want) from error
    except ValueError as error:  # of tomli, with the line; or it is not UTF-8
        # tomli >= 2.2 has the line as an attribute; every version has it in the message.
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line is not None else path
        raise ConfigError(key, where, f"valid TOML in UTF-8 ({error})") from error


def in_folder(text: str, folder: Path) -> str:
    """Put a file's folder in the place of ``${config_dir}`` in its strings, of TOML or of JSON."""
    return text.replace(CONFIG_DIR, json.dumps(str(folder.resolve()))[1:-1])


def check_toml(
    values: dict[str, Any],
    config_cls: type,
    section: Any = None,
    prefix: str = "",
    skip_unknown: bool = False,
) -> dict[str, Any]:
    """Check a TOML table against a dataclass, section by section; floats may be integers.

    Below the top, ``section`` is the table's dataclass and ``prefix`` its name with a dot.
    """
    checked: dict[str, Any] = {}
    known = {option.name: option for option in fields(section or config_cls)}
    for name, value in values.items():
        key = prefix + name
        if name not in known:
            if skip_unknown:
                continue
            raise unknown_key(key, "a table" if isinstance(value, dict) else value, config_cls)
        option = known[name]
        if is_dataclass(option.type):
            if not isinstance(value, dict):
                raise ConfigError(key, value, f"a table: [{key}] with its keys below it")
            checked[name] = check_toml(value, config_cls, option.type, f"{key}.", skip_unknown)
        else:
            checked[name] = _match(value, option.type)
            if checked[name] is MISSING:
                raise _misfit(key, value, option)
    return checked


def typed_overrides(overrides: list[Override], config_cls: type) -> dict[str, Any]:
    """Return the tables of command-line overrides, whose texts become values of the keys' types.

    A boolean is ``--a.b``, ``--a.no_b`` or ``--a.b=true``, None ``None``, a list has commas.
    """
    known, values = _keys(config_cls), dict[str, Any]()
    for key, text in overrides:
        *sections, name = key.split(".")
        positive = ".".join([*sections, name.removeprefix("no_")])
        negated = key not in known and positive in known and _is_flag(known[positive])
        option = known.get(positive if negated else key)
        if option is None:
            raise unknown_key(key, text or "", config_cls)
        require(not negated or text is None, key, text, "no value: this flag means false")
        value: Any = not negated if _is_flag(option) else MISSING
        if text is not None:
            value = _match(_read(text, _alternatives(option.type)), option.type)
        if value is MISSING:
            raise _misfit(key, text or "", option)
        table = values
        for section in sections:
            table = table.setdefault(section, {})
        table[option.name] = value
    return values


def unknown_key(key: str, value: object, config_cls: type) -> ConfigError:
    """Build the error for an unknown key, with a known one of its name or spelling, or a list."""
    section, _, name = key.rpartition(".")
    leaves = list(_keys(config_cls))
    if not any("." in leaf for leaf in leaves):  # a table of an experiment has no sections
        return ConfigError(key, value, one_of(leaves, name))
    sections = sorted({leaf.rpartition(".")[0] for leaf in leaves})
    likely = [leaf for leaf in leaves if leaf.rpartition(".")[2] == name]
    likely += difflib.get_close_matches(key, [*leaves, *sections], 1, cutoff=0.75)
    beside = [leaf for leaf in leaves if leaf.rpartition(".")[0] == section]
    want = f"one of {', '.join(beside or sections)}"
    if likely:
        guess = f"[{likely[0]}]" if likely[0] in sections else likely[0]
        want = f"a known key: did you mean {guess}?"
    return ConfigError(key, value, want)


def _keys(section: Any, prefix: str = "") -> dict[str, Field[Any]]:
    """Return every field below a section by its dotted key."""
    found: dict[str, Field[Any]] = {}
    for option in fields(section):
        key = prefix + option.name
        found |= _keys(option.type, key + ".") if is_dataclass(option.type) else {key: option}
    return found


def _is_flag(option: Field[Any]) -> bool:
    return _alternatives(option.type) == (bool,)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or of ``Annotated[str, names]``; else the annotation."""
    if get_origin(annotation) is Annotated:
        kind, first = get_args(annotation)[:2]
        return (Literal[tuple(first)],) if isinstance(first, list | dict) else _alternatives(kind)
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _match(value: Any, annotation: Any) -> Any:
    """Return a TOML value converted to the annotation, or MISSING if it does not fit."""
    for kind in _alternatives(annotation):
        if get_origin(kind) is Literal:
            if any(value == choice and type(value) is type(choice) for choice in get_args(kind)):
                return value
        elif get_origin(kind) is list:
            if isinstance(value, list):
                items = [_match(item, get_args(kind)[0]) for item in value]
                if not any(item is MISSING for item in items):
                    return items
        elif get_origin(kind) is dict:  # its keys are checked by what reads it
            if isinstance(value, dict):
                return value
        # type() rather than isinstance(): true is not an integer.
        elif kind is float and type(value) in (int, float):
            with suppress(OverflowError):
                return float(value)
        elif type(value) is kind:
            return value
    return MISSING


def _read(text: str, kinds: tuple[Any, ...]) -> Any:
    """Return a command-line text as the first of some types that it can be, else the text."""
    if type(None) in kinds and text in ("None", "none"):
        return None
    for kind in kinds:
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind == list[str]:
            return [part.strip() for part in text.split(",")] if text.strip() else []
        with suppress(ValueError):
            if kind in (int, float):
                return kind(text)
    return text


def _misfit(key: str, value: Any, option: Field[Any]) -> ConfigError:
    """Build the error for a value of a wrong type; it describes the values of the field."""
    default, wants = option.default, []
    for kind in _alternatives(option.type):
        if get_origin(kind) is Literal:
            wants.append(one_of(map(repr, get_args(kind)), repr(value)))
        elif kind is not type(None):
            wants.append(_WORDS.get(kind, "a list of tables [[...]], in the TOML file"))
    shown = type(default) in (int, float) or (default and type(default) is str)
    if shown and wants[-1] in _WORDS.values():
        wants[-1] += f" such as {default!r}"
    return ConfigError(key, value, " or ".join(wants))
