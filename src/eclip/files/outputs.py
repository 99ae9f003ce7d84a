"""Output paths: checks before work begins, and another place if writing fails at the end.

``check_output`` and ``check_folder`` refuse an unusable path in one line, before any measuring.
``save_or_rescue`` never loses a result to a full disk or a missing folder: the result goes to
another place, and an error names that place. The caller raises the error after printing the result.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from eclip.errors import ArtefactError
from eclip.files import store
from eclip.files.comparison import Comparison
from eclip.files.store import Artefact
from eclip.files.writing import check_name, folder_of

_MOST_NAMES = 100  # rescued files in one folder


class RescuedError(ArtefactError):
    """A result could not be written where it was asked for. ``path`` is where it is instead;
    None: it could be written nowhere.
    """

    exit_code = 1

    def __init__(self, message: str, path: Path | None) -> None:
        super().__init__(message)
        self.path = path


def check_output(path: Path, what: type[Artefact] | bytes) -> None:
    """Refuse a path to which ``store.save`` (of this type), or ``store.save_export`` (with this
    mark) could not write.
    """
    check_name(path, "file")
    store.check_replaceable(path, what)
    _check_room(path, folder_of(path))


def check_folder(path: Path) -> None:
    """Refuse an unusable output folder. A missing folder is accepted and made later."""
    check_name(path, "folder")
    there = path.absolute()
    try:
        while not there.exists():
            if there.is_symlink():
                raise ArtefactError(
                    f"cannot use the folder {path}: {there.name} is a link to "
                    f"{there.readlink()}, which does not exist; remove the link"
                )
            there = there.parent
    except OSError as error:  # such as a name that is too long
        raise ArtefactError(f"cannot use the folder {path}: {error.strerror or error}") from None
    if not there.is_dir():
        raise ArtefactError(
            f"cannot use the folder {path}: {there.name} is a file; choose another name"
        )
    longest = os.pathconf(there, "PC_NAME_MAX")
    if any(len(os.fsencode(part)) > longest for part in path.parts):
        raise ArtefactError(f"cannot use the folder {path}: File name too long")
    _check_room(path, there)


def save_or_rescue(artefact: Artefact, path: Path) -> RescuedError | None:
    """Save, here or elsewhere. The caller raises the returned error at its end."""
    return rescue(lambda place: store.save(artefact, place), path)


def append_or_rescue(comparison: Comparison, path: Path) -> RescuedError | None:
    """As ``save_or_rescue``, for a line of a results file."""
    return rescue(lambda place: store.append(comparison, place), path)


def rescue(write: Callable[[Path], None], path: Path) -> RescuedError | None:
    """Write to the path, or beside it, or in the current folder, or in the temporary one."""
    try:
        write(path)
    except ArtefactError as error:
        reason = str(error)
    else:
        return None
    for folder in dict.fromkeys((path.parent, Path.cwd(), Path(tempfile.gettempdir()))):
        place = _free_name(folder, path.name)
        if place is None:
            continue
        try:
            write(place)
        except ArtefactError:
            continue
        return RescuedError(f"{reason}; the result is in {place} instead", place)
    return RescuedError(f"{reason}; nor could it be written anywhere else", None)


def _free_name(folder: Path, name: str) -> Path | None:
    stem, dot, suffix = name.partition(".")
    stem = stem[:100]  # the name may have been too long
    for number in range(1, _MOST_NAMES + 1):
        place = folder / f"{stem}.rescued-{number}{dot}{suffix}"
        try:
            place.lstat()
        except FileNotFoundError:
            return place
        except OSError:
            return None
    return None


def _check_room(path: Path, folder: Path) -> None:
    """Refuse a folder in which nothing can be made, as far as that can be known."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ArtefactError(f"cannot write {path}: no permission to write to {folder}")
    disk = os.statvfs(folder)
    if (disk.f_blocks and not disk.f_bavail) or (disk.f_files and not disk.f_ffree):
        raise ArtefactError(f"cannot write {path}: the disk is full; make room or go elsewhere")
