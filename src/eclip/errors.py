"""Every error eclip raises on purpose.

    EclipError                  one line of text, and the exit code of the command line
    ├── UsageError              an unknown or invalid name, mix or option
    ├── ArtefactError           a missing, damaged, newer or foreign file
    ├── MismatchError           artefacts that do not fit each other, or do not fit a device
    ├── PlanningError           no plan satisfies the request
    ├── StoppedError            a stop was requested before there was a result
    └── DeviceError             a device cannot do a requested thing
        ├── FullError           no room for another request now; room comes later
        ├── TracingError        kernels cannot be recorded; the other measurements are valid
        └── ArenaError          a variable-output stage ran out of room for its output

A message says what is wrong and what to do next. The command line prints the message after
``eclip:`` and exits with the class's code, without a traceback. The checks at
the end have words that fit Python and the command line.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

MOST_WHOLE = 2**53  # as in stored files


class EclipError(Exception):
    """The base of all errors that eclip raises on purpose; its text is one line."""

    exit_code = 1


class UsageError(EclipError):
    """An unknown or invalid name, mix or option."""

    exit_code = 2


class ArtefactError(EclipError):
    """A missing, damaged, newer or foreign file."""

    exit_code = 2


class MismatchError(EclipError):
    """Artefacts that do not fit each other, or do not fit a device."""

    exit_code = 2


class PlanningError(EclipError):
    """No plan satisfies the request."""

    exit_code = 1


class StoppedError(EclipError):
    """A stop was requested before there was a result."""

    exit_code = 130


class DeviceError(EclipError):
    """A device cannot do a requested thing."""

    exit_code = 1


class FullError(DeviceError):
    """No room for another request now: poll for completions, then submit it again."""


class TracingError(DeviceError):
    """Kernels cannot be recorded; the other measurements are valid."""


class ArenaError(DeviceError):
    """A request failed because its arena was too small. No output was cut off."""

    def __init__(self, stage: str, needed: int, words: int) -> None:
        super().__init__(
            f"{stage} needed {needed} words of overflow space and its arena has {words}; give it a "
            f"larger arena or capacity"
        )
        self.needed = needed
        self.words = words


def unknown_name(what: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for an unknown name; its text has the most similar name, and all known names."""
    names = list(known)
    near = nearest_name(name, names)
    meant = "; " if near is None else f"; did you mean {near}? "
    return UsageError(f"unknown {what} {name!r}{meant}choose one of: {', '.join(names)}")


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that the user most probably meant; None: no name is similar."""
    by_plain = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_plain, n=1)
    return by_plain[near[0]] if near else None


def check_whole(name: str, value: Any, least: int = 0) -> None:
    """Refuse what is no whole number of at least ``least``."""
    right = isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_WHOLE
    if not right:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {value!r}")


def check_number(name: str, value: Any, least: float = 0) -> None:
    """Refuse what is no finite number of at least ``least``."""
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if not right or not math.isfinite(value) or value < least:
        raise UsageError(f"{name} must be a number of at least {least:g}, not {value!r}")
