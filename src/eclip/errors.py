"""Every error eclip raises on purpose.

    EclipError                  one line for a person, and the exit code that goes with it
    ├── UsageError              a name, mix or option that means nothing here
    ├── ArtefactError           a file that is missing, damaged, newer or foreign
    ├── MismatchError           artefacts, or an artefact and a device, that do not fit
    ├── PlanningError           no plan satisfies what was asked
    ├── StoppedError            a stop was asked for before there was a result
    └── DeviceError             a device that cannot do what was asked of it
        ├── FullError           no room for another request now; later there is
        ├── TracingError        kernels cannot be recorded; what was measured still counts
        └── ArenaError          a variable-output stage that found no room for what it wrote

A message says what is wrong and what to do next. The command line prints it after ``eclip:`` and
exits with the class's code; no traceback reaches a person for anything below EclipError.
"""

from collections.abc import Iterable


class EclipError(Exception):
    """Whatever eclip raises on purpose; its text is one line for a person."""

    exit_code = 1


class UsageError(EclipError):
    """A name, mix or option that means nothing here."""

    exit_code = 2


class ArtefactError(EclipError):
    """A file that is missing, damaged, newer or foreign."""

    exit_code = 2


class MismatchError(EclipError):
    """Artefacts, or an artefact and a device, that do not fit."""

    exit_code = 2


class PlanningError(EclipError):
    """No plan satisfies what was asked."""

    exit_code = 1


class StoppedError(EclipError):
    """A stop was asked for before there was a result."""

    exit_code = 130


class DeviceError(EclipError):
    """A device that cannot do what was asked of it."""

    exit_code = 1


class FullError(DeviceError):
    """No room for another request now: poll for completions, then submit it again."""


class TracingError(DeviceError):
    """Kernels cannot be recorded; what was measured still counts."""


class ArenaError(DeviceError):
    """Nothing was cut off: the request failed, and these are the numbers."""

    def __init__(self, stage: str, needed: int, words: int) -> None:
        super().__init__(
            f"{stage} needed {needed} words of overflow space and its arena has {words}; give it a "
            f"larger arena or capacity"
        )
        self.needed = needed
        self.words = words


def unknown_name(what: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a wrong name: it lists the right ones."""
    return UsageError(f"unknown {what} {name!r}; choose one of: {', '.join(known)}")
