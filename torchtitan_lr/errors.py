# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Exceptions with a one-line message: a user's mistakes, with the TOML key, and failed runs."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable

# Torch's words for a device, or a machine, without memory.
OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory", re.IGNORECASE)

# Controls (C0 but tab and newline, DEL, C1), line and paragraph separators, overrides of the
# writing direction, and halves of surrogate pairs, which no output can encode.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

_LONGEST = 500  # characters of a value in a message


def escaped(text: str, keep: str = "") -> str:
    r"""Return a text without control characters, which could forge what a terminal shows."""
    # They become escapes such as ``\x1b``, but those to ``keep``. Everything that prints names,
    # paths, values or texts from a file uses this function.
    found = _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    for control, written in (("\t", "\\t"), ("\n", "\\n")):
        if control not in keep:
            found = found.replace(control, written)
    return found


class ConfigError(ValueError):
    """Invalid setting; the message has the key, the value and the expected values on one line."""

    def __init__(self, key: str, got: object, want: str) -> None:
        self.key = key  # in dotted form, ``training.steps``, or another input: ``--config-file``
        self.got = got
        self.want = want  # a phrase: ``an integer such as 1000``
        shown = repr(got)
        if len(shown) > _LONGEST:
            shown = f"{shown[: _LONGEST - 100]}...{shown[-50:]}"
        super().__init__(escaped(" ".join(f"{key}: got {shown}, expected {want}".split())))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        """Pickle by the arguments: a process of a pool raises it in its parent."""
        return type(self), (self.key, self.got, self.want)


def require(ok: object, key: str, got: object, want: str) -> None:
    """Raise a ConfigError unless ``ok``."""
    if not ok:
        raise ConfigError(key, got, want)


def one_of(choices: Iterable[object], got: object) -> str:
    """Return the phrase for a choice among names, with the one that was probably meant."""
    by_text = {str(choice).lower(): str(choice) for choice in choices}
    near = difflib.get_close_matches(str(got).lower(), by_text, 1)
    hint = f" (did you mean {by_text[near[0]]}?)" if near else ""
    return f"one of {', '.join(by_text.values())}{hint}"


class DataError(ConfigError):
    """Unreadable training text; ``got`` is the file, with the line number for line formats."""


class LostDeviceError(ConfigError):
    """A machine has fewer devices than ranks; on another one the same run may start."""


class RunFailedError(RuntimeError):
    """A run ended with an error, at a rank (None for the one that raises) and a step, if known."""

    def __init__(self, message: str, rank: int | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.step = rank, step


def describe_error(error: BaseException) -> str | None:
    """Return the line for an error that is no `ConfigError`; None for one that a bug raises."""
    # Libraries wrap the errors of the system in their own: causes are looked at too.
    if isinstance(error, RunFailedError):
        return str(error)
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    for found in causes:
        if isinstance(found, MemoryError) or OUT_OF_MEMORY.search(str(found)):
            text = str(found).partition("\n")[0] or "the machine has no more"
            return f"error: too little memory: {text}"
        if isinstance(found, OSError):
            name = found.filename
            where = f"{os.fsdecode(name)}: " if isinstance(name, (str, bytes)) else ""
            return " ".join(f"error: {where}{found.strerror or found}".split())
    return None
