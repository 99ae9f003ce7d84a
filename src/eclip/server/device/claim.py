"""One server a GPU, unless all of them share it through the board.

Two servers that know nothing of each other would each promise the whole GPU. So a server locks a
file for its GPU as long as it lives: for itself, or together with others where ``ECLIP_BOARD`` says
that they see each other. The kernel gives the lock back however the server ends. Servers find each
other's file as boards do: the same user and the same ``/dev/shm``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from eclip.errors import DeviceError
from eclip.gpu.board import VARIABLE

_FOLDER = Path("/dev/shm")


def shares_gpu() -> bool:
    """Others may run on the GPU, and the board tells who is busy."""
    return bool(os.environ.get(VARIABLE))


@contextlib.contextmanager
def claimed(uuid: str) -> Iterator[None]:
    """While the block lasts, the GPU is this server's, or of all that share it."""
    path = _FOLDER / f"eclip-server-{os.geteuid()}-{uuid}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DeviceError(f"cannot open {path} ({error.strerror}); remove it") from None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shares_gpu() else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DeviceError(
            f"another server runs on {uuid}; end it, choose another GPU, or start both with "
            f"{VARIABLE}={_FOLDER}, so that their services and background see each other"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)
