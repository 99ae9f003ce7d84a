"""Writing files: paths that can be written to, and bytes that are written all or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from eclip.errors import ArtefactError


def check_name(path: Path, what: str) -> None:
    """Refuse ``-``, which other programs take for standard output."""
    if str(path) == "-":
        raise ArtefactError(
            f"- is not a {what} name; name a {what} (tables and JSON go to standard output)"
        )


def folder_of(path: Path) -> Path:
    """The folder that a file is written to: of a link, the folder of the file it leads to."""
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # a link that leads to itself; RuntimeError before Python 3.13
        raise ArtefactError(f"cannot write {path}: its links lead in a circle") from None
    if target.parent.is_dir():
        return target.parent
    if path.is_symlink():
        raise ArtefactError(
            f"cannot write {path}: it is a link to {target}, and there is no folder "
            f"{target.parent}; make the folder, or remove the link"
        )
    raise ArtefactError(f"cannot write {path}: there is no folder {path.parent}; make it first")


def exists(path: Path) -> bool:
    """Whether the path, or the file that a link leads to, exists."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # such as a name that is too long
        raise ArtefactError(f"cannot write {path}: {error.strerror or error}") from None
    return True


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` or leave it as it was."""
    folder = folder_of(path)
    target = path.resolve()  # a link stays a link
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".eclip-", suffix=".tmp")
    except OSError as error:
        raise ArtefactError(f"cannot write {path}: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~_umask())  # mkstemp's 0600 would stop other users
        Path(name).replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        if isinstance(error, OSError):
            raise ArtefactError(f"cannot write {path}: {error.strerror or error}") from None
        raise


def _umask() -> int:
    umask = os.umask(0o022)  # there is no way to read it without setting it
    os.umask(umask)
    return umask
