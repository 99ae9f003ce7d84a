"""The board between processes: a small mapped file on which workers say how they are.

core/rules.py has the words of a row; native/board.h is the same layout in C. There is a
board for every GPU and user. Sessions of any process or container that opens the same file see each
other; pids play no part, because containers do not share them.

The owner of a row holds an OFD file lock on its bytes. The kernel gives it back when the last copy
of the descriptor and the last mapping made with it are gone, however the process ends. So words
whose lock is free are left over: the next claim of that row overwrites them, and sessions that live
clear them. Readers ask for no lock. To them an owner that is killed or stopped is idle as soon as
its heartbeat is too old.

A forked child neither owns nor ends its parent's rows. Python's forks close the child's copy of the
descriptor and put memory of the child's own where the board was; else a data loader could keep the
row of a dead service. Children forked by other code keep the lock until they end or call exec.

All processes that may write the file are trusted. It is the user's alone (mode 0600), and no
process removes or truncates it. Times are those of CLOCK_MONOTONIC, which containers share unless
they were given a time namespace of their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from eclip.core.device import Closing
from eclip.core.plan import PlannedWorker, Promise
from eclip.core.rules import (
    HEARTBEAT,
    MOST_ROWS,
    NOBODY,
    STOPPED_NS,
    TIER,
    WORDS,
    Ints,
    clear,
    enter,
)
from eclip.errors import ArtefactError, DeviceError, UsageError

VARIABLE = "ECLIP_BOARD"  # a file, or a folder with a file for every GPU
MAGIC = int.from_bytes(b"eclipbrd", "little")
VERSION = 3
ROW_BYTES = 8 * WORDS
FIRST_ROW = ROW_BYTES  # where row 0 begins: the header has as much room as a row
SIZE = FIRST_ROW + MOST_ROWS * ROW_BYTES
HEADER = (MAGIC, VERSION, MOST_ROWS, WORDS)  # its first words; the others are 0

# A fifth of what counts as stopped: the thread that beats needs the GIL, which others may hold for
# a while. The driving loop holds none and beats too, at every request and joint.
BEAT_S = 0.02
_SWEEP_BEATS = 5
_FOLDER = Path("/dev/shm")
_ATTEMPTS = 5  # a row that is being cleared is locked for a moment
_PAUSE_S = 0.002
_ADVICE = f"remove it, or set {VARIABLE} to another path"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10


def board_path(uuid: str) -> Path:
    """Where the board of the GPU with this UUID is."""
    place = _place()
    return place / f"{_prefix()}{uuid}" if place.is_dir() else place


def boards_here() -> list[Path]:
    """The boards of this user, where sessions of this environment would look for theirs."""
    place = _place()
    return sorted(place.glob(f"{_prefix()}*")) if place.is_dir() else [place]


def _place() -> Path:
    """A file, or a folder with a file for every GPU."""
    return Path(os.environ.get(VARIABLE) or _FOLDER).absolute()


def _prefix() -> str:
    return f"eclip-board-{os.geteuid()}-"


def open_board(path: Path) -> Board:
    """The board in this file, which is made if there is none."""
    with _told(str(path)):
        return Board(_open_or_make(path), str(path))


def shared_board(uuid: str) -> Board | None:
    """The board that the user shares between processes; None: every session is alone."""
    return open_board(board_path(uuid)) if os.environ.get(VARIABLE) else None


def private_board() -> Board:
    """A board without a name, for processes that get its descriptor from this one."""
    with _told("of a set of processes"):
        descriptor = os.memfd_create("eclip-board")
        try:
            _fill(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return Board(descriptor, "of a set of processes")


class Board(Closing):
    """A board, open in this process, with the rows that it owns there.

    ``words`` are the rows of all owners. An owner writes its own ones only, and not after it has
    released them. Closing releases all rows; ``words`` stays readable for as long as it is
    referenced.
    """

    def __init__(self, descriptor: int, name: str) -> None:
        """Takes the descriptor over."""
        self._name = name
        self._owned: set[int] = set()
        self._lock = threading.Lock()  # of the rows owned, and of locks in the file
        try:
            check_board(descriptor, name)
            os.posix_fallocate(descriptor, 0, SIZE)  # also if the file was copied with holes
            self._memory = _Memory(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self.words: Ints = self._memory.words
        self._heart = Heart(self.words, self.sweep)
        self.sweep()

    @property
    def descriptor(self) -> int:
        """For children that get rows of this board. The locks last until all have closed it."""
        if self._memory.descriptor is None:
            raise DeviceError(f"the board {self._name} is closed, or belongs to a parent process")
        return self._memory.descriptor

    def claim(self, promise: Promise | None = None, name: str = "", *, beats: bool = True) -> int:
        """A row for a service with this promise, else for background; the name is for people.

        Without ``beats`` the borrower of the row says that its owner runs.
        """
        for _ in range(_ATTEMPTS):
            with self._lock:
                row = self._take_free_row()
                if row is not None:
                    enter(self.words, row, promise, _now_ns(), name)
                    if beats:
                        self._heart.add(row)
                    return row
            time.sleep(_PAUSE_S)
        raise DeviceError(
            f"the board {self._name} is full: {MOST_ROWS} workers share this GPU already; end some "
            f"of them"
        )

    def claim_all(self, workers: Sequence[PlannedWorker], *, beats: bool = True) -> tuple[int, ...]:
        """Rows for all workers of a session, or an error and none."""
        rows = []
        with contextlib.ExitStack() as undo:
            for worker in workers:
                row = self.claim(worker.promise, worker.name, beats=beats)
                undo.callback(self.release, row)
                rows.append(row)
            undo.pop_all()
        return tuple(rows)

    def release(self, row: int) -> None:
        """Give a row back; one that is not ours, or our parent's, is left as it is."""
        if self._memory.descriptor is None:
            return
        with self._lock:
            if row in self._owned:
                self._heart.remove(row)
                clear(self.words[row])
                self._owned.discard(row)
                _unlock(self.descriptor, row)

    def sweep(self) -> None:
        """Clear rows whose owners are gone."""
        if self._memory.descriptor is None:
            return
        # A heartbeat ahead of our clock is from before the machine was started.
        silent = np.abs(_now_ns() - self.words[:, HEARTBEAT]) > STOPPED_NS
        for row in np.flatnonzero(silent & (self.words[:, TIER] != NOBODY)).tolist():
            with self._lock:
                if row not in self._owned and _try_lock(self.descriptor, row):
                    clear(self.words[row])
                    _unlock(self.descriptor, row)

    def close(self) -> None:
        if self._memory.descriptor is None:
            return
        self._heart.close()
        for row in tuple(self._owned):
            self.release(row)
        self._memory.close()

    def _take_free_row(self) -> int | None:
        descriptor = self.descriptor
        for row in range(MOST_ROWS):
            # The kernel would give us a lock twice.
            if row not in self._owned and _try_lock(descriptor, row):
                self._owned.add(row)
                return row
        return None


class LentRow(Closing):
    """A row that a parent process owns and this one writes, through a descriptor it inherited.

    The lock is the set's: it lasts while the parent or any child lives. Nothing is claimed or swept
    here, because the kernel cannot tell this process from its siblings.
    """

    def __init__(self, descriptor: int, row: int) -> None:
        """Takes the descriptor over."""
        os.set_inheritable(descriptor, False)
        with _told("of a set of processes"):
            check_board(descriptor, "of a set of processes")
            self._memory = _Memory(descriptor)
        self.words: Ints = self._memory.words
        self.row = row
        self._heart = Heart(self.words)
        self._heart.add(row)

    def close(self) -> None:
        if self._memory.descriptor is not None:
            self._heart.close()
            self._memory.close()


class Heart(Closing):
    """Beats for rows while this process runs, from a thread that a stopped process stops too."""

    def __init__(self, words: Ints, sweep: Callable[[], None] | None = None) -> None:
        self._words = words
        self._sweep = sweep
        self._rows: set[int] = set()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._live, name="eclip-board", daemon=True)

    def add(self, row: int) -> None:
        with self._lock:
            self._rows.add(row)
            if self._thread.ident is None:
                self._thread.start()

    def remove(self, row: int) -> None:
        """After this nothing is written there."""
        with self._lock:
            self._rows.discard(row)

    def close(self) -> None:
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _live(self) -> None:
        beats = 0
        while not self._end.wait(BEAT_S):
            with self._lock:
                for row in self._rows:
                    self._words[row, HEARTBEAT] = _now_ns()
            beats += 1
            if self._sweep is not None and beats % _SWEEP_BEATS == 0:
                with contextlib.suppress(DeviceError):  # beating matters more
                    self._sweep()


class _Memory:
    """A board's pages in this process, and the descriptor that its locks belong to.

    Python's own ``mmap`` has a copy of the descriptor that a forked child could not close, and the
    locks would stay with it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor: int | None = descriptor
        self._pages = _Pages(_map(None, mmap.MAP_SHARED, descriptor))
        self.words: Ints = np.asarray(self._pages)[1:]
        _open_in_this_process.add(self)

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def leave_to_parent(self) -> None:
        """In a forked child: nothing that it does can be seen on the board."""
        with contextlib.suppress(OSError):
            self.close()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        _map(self._pages.address, flags, -1)


class _Pages:
    """Mapped memory that lives as long as an array looks at it."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.__array_interface__ = {
            "version": 3,
            "typestr": np.dtype(np.int64).str,
            "shape": (1 + MOST_ROWS, WORDS),
            "data": (address, False),
        }
        # Not at exit: threads that still run may look at it until the process is gone.
        weakref.finalize(self, _libc.munmap, address, SIZE).atexit = False


_open_in_this_process: weakref.WeakSet[_Memory] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for memory in tuple(_open_in_this_process):
        memory.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)


def _map(address: int | None, flags: int, descriptor: int) -> int:
    access = mmap.PROT_READ | mmap.PROT_WRITE
    at: int = _libc.mmap(address, SIZE, access, flags, descriptor, 0)
    if at == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return at


def _open_or_make(path: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        _make(path)
    return os.open(path, flags)


def _make(path: Path) -> None:
    """Put a whole board there; a board that another process put there first stays."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(draft, flags, 0o600)
    try:
        _fill(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
        os.close(descriptor)


def _fill(descriptor: int) -> None:
    """An empty board. Space is taken first: to write to pages that a full file system cannot give
    would end the process."""
    os.fchmod(descriptor, 0o600)
    os.posix_fallocate(descriptor, 0, SIZE)
    os.pwrite(descriptor, struct.pack(f"={len(HEADER)}q", *HEADER), 0)


def check_board(descriptor: int, name: str) -> None:
    """Refuse what is not exactly a board of ours."""
    found = os.fstat(descriptor)
    header = os.pread(descriptor, 8 * len(HEADER), 0) if stat.S_ISREG(found.st_mode) else b""
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ArtefactError(f"the board {name} is open to other users; {_ADVICE}")
    if len(header) < 8 * len(HEADER) or not header.startswith(struct.pack("=q", MAGIC)):
        raise ArtefactError(f"{name} is no board of eclip; {_ADVICE}")
    _, version, rows, words = struct.unpack(f"={len(HEADER)}q", header)
    if version != VERSION:
        raise ArtefactError(
            f"the board {name} is of version {version}, and this eclip's is {VERSION}: end what "
            f"uses it and {_ADVICE}"
        )
    if (rows, words) != (MOST_ROWS, WORDS) or found.st_size != SIZE:
        raise ArtefactError(f"the board {name} is damaged; {_ADVICE}")


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """The system's refusals as one line for a person."""
    try:
        yield
    except OSError as error:
        room = "; containers get more with --shm-size" if error.errno == errno.ENOSPC else ""
        raise UsageError(
            f"the board {name} cannot be used: {error.strerror}{room}; set {VARIABLE} to a path in "
            f"shared memory that this user can write"
        ) from None


def _try_lock(descriptor: int, row: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _of_row(fcntl.F_WRLCK, row))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise DeviceError(f"a row of the board cannot be locked: {error.strerror}") from None
    return True


def _unlock(descriptor: int, row: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _of_row(fcntl.F_UNLCK, row))


def _of_row(kind: int, row: int) -> bytes:
    """C's ``struct flock`` for the bytes of a row; the pid at its end must be 0."""
    return struct.pack("hhqqi0q", kind, os.SEEK_SET, FIRST_ROW + row * ROW_BYTES, ROW_BYTES, 0)


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
