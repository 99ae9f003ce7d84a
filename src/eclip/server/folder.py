"""A server's own folder in the temporary directory: plans, names of regions, the door.

A server that ends removes its folder. One that is killed cannot, so the next server of the same
user does it. The owner of a folder holds a lock in it, and the kernel gives the lock back however
the owner ends: a folder whose lock is free has no owner any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK = ".lock"  # no region is called so


@contextlib.contextmanager
def own_folder(prefix: str = "eclip-server-") -> Iterator[Path]:
    """A new folder while the block lasts. Those of the dead with this prefix are removed first."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_if_dead(path)
    with contextlib.ExitStack() as stack:
        yield _locked(prefix, stack)


def _locked(prefix: str, stack: contextlib.ExitStack) -> Path:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # no locks here: then no server removes it either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            stack.callback(os.close, lock)
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            return path
        os.close(lock)  # another server that starts took it for a dead one's, before the lock


def _remove_if_dead(path: Path) -> None:
    try:
        if path.stat(follow_symlinks=False).st_uid != os.geteuid():
            return
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # no folder of a server, or one that has just begun or ended
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:  # its server lives
        pass
    finally:
        os.close(lock)
