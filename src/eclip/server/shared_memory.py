"""System shared memory that clients register to pass tensors without sending them.

A region is a name for a part of an object in ``/dev/shm``. The names of a server are files in one
folder, which all its fronts share: a client may register at one front and be served by another.

Objects are read and written through their file descriptors and never mapped: a client that
truncates an object under us gets an error, where a mapping would end this process (SIGBUS).
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from eclip.server.limits import Limits
from eclip.server.messages import Reason, RefusedError
from eclip.server.tensors import bad_request

_OBJECTS = Path("/dev/shm")
_KEY = re.compile(r"/?([A-Za-z0-9_.\-]{1,250})")
# Names of eclip's own objects begin like this: no client may have them.
RESERVED = "eclip-"


class Region(msgspec.Struct, frozen=True):
    """A part of an object, as its client described it."""

    name: str
    key: str
    offset: int
    byte_size: int


class MemoryPlace(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor is: a part of a region."""

    region: str
    offset: int
    byte_size: int


class _Opened(msgspec.Struct, frozen=True):
    region: Region
    identity: tuple[int, int]  # of the file that names it: inode and time
    descriptor: int


class Regions:
    """The regions of a server, as one of its fronts sees them."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._opened: dict[str, _Opened] = {}

    def register(self, region: Region) -> None:
        _check_range(region.offset, region.byte_size)
        if len(self.all()) >= self._limits.regions:
            raise bad_request(
                f"there are {self._limits.regions} shared memory regions; unregister some first"
            )
        descriptor = _open_object(region)
        os.close(descriptor)
        # A name appears with its content: written beside it, then linked, which never replaces.
        draft = self._folder / f".{os.getpid()}"
        draft.write_bytes(msgspec.json.encode(region))
        try:
            os.link(draft, self._file(region.name))
        except FileExistsError:
            raise RefusedError(
                Reason.ALREADY_EXISTS,
                f"shared memory region {region.name!r} is registered already; unregister it first",
            ) from None
        finally:
            draft.unlink()

    def unregister(self, name: str) -> None:
        """A name that is not registered is no error: that is what was asked for."""
        self._file(name).unlink(missing_ok=True)
        self._forget(name)

    def unregister_all(self) -> None:
        for region in self.all():
            self.unregister(region.name)

    def get(self, name: str) -> Region:
        return self._open(name).region

    def all(self) -> list[Region]:
        names = [unquote(path.name) for path in self._folder.glob("[!.]*")]
        found = []
        for name in sorted(names):
            with contextlib.suppress(FileNotFoundError):  # unregistered meanwhile
                found.append(self._described(name))
        return found

    def read(self, place: MemoryPlace) -> bytes:
        opened = self._within(place)
        data = os.pread(opened.descriptor, place.byte_size, opened.region.offset + place.offset)
        if len(data) != place.byte_size:
            raise _shrunk(place)
        return data

    def check(self, place: MemoryPlace) -> None:
        """That the place is inside its region."""
        self._within(place)

    def write(self, place: MemoryPlace, tensor: str, data: memoryview | bytes) -> None:
        opened = self._within(place)
        if len(data) > place.byte_size:
            raise bad_request(
                f"output {tensor!r} has {len(data)} bytes; {place.byte_size} are reserved for it "
                f"in shared memory region {place.region!r}"
            )
        # Writing past the end would make the client's object longer.
        start = opened.region.offset + place.offset
        if os.fstat(opened.descriptor).st_size < start + len(data):
            raise _shrunk(place)
        os.pwrite(opened.descriptor, data, start)

    def close(self) -> None:
        for name in list(self._opened):
            self._forget(name)

    def _file(self, name: str) -> Path:
        """``quote`` leaves no slash; a first dot is quoted too, so ``..`` and drafts are safe."""
        quoted = quote(name, safe="")
        quoted = f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted
        if not 0 < len(quoted) <= 255:
            raise bad_request("a shared memory region needs a name of at most 255 characters")
        return self._folder / quoted

    def _described(self, name: str) -> Region:
        return msgspec.json.decode(self._file(name).read_bytes(), type=Region)

    def _open(self, name: str) -> _Opened:
        try:
            status = self._file(name).stat()
            identity = (status.st_ino, status.st_mtime_ns)
            opened = self._opened.get(name)
            if opened is None or opened.identity != identity:
                self._forget(name)
                region = self._described(name)
                opened = _Opened(region, identity, _open_object(region))
                self._opened[name] = opened
                if len(self._opened) > self._limits.regions:  # unregistered at another front
                    self._forget(next(iter(self._opened)))
        except FileNotFoundError:
            self._forget(name)
            raise RefusedError(
                Reason.UNKNOWN_REGION, f"no shared memory region {name!r} is registered"
            ) from None
        return opened

    def _within(self, place: MemoryPlace) -> _Opened:
        opened = self._open(place.region)
        _check_range(place.offset, place.byte_size)
        if place.offset + place.byte_size > opened.region.byte_size:
            raise bad_request(
                f"{place.byte_size} bytes from byte {place.offset} are not within shared memory "
                f"region {place.region!r}, which has {opened.region.byte_size}"
            )
        return opened

    def _forget(self, name: str) -> None:
        opened = self._opened.pop(name, None)
        if opened is not None:
            os.close(opened.descriptor)


def _shrunk(place: MemoryPlace) -> RefusedError:
    return bad_request(f"the object of shared memory region {place.region!r} has become shorter")


def _check_range(offset: int, byte_size: int) -> None:
    if offset < 0 or byte_size <= 0:
        raise bad_request(
            f"a range of shared memory needs an offset from 0 and a size from 1, not {offset} "
            f"and {byte_size}"
        )


def _open_object(region: Region) -> int:
    """The object's descriptor; a link is not followed, and only memory objects are opened."""
    match = _KEY.fullmatch(region.key)
    if match is None or match[1] in (".", "..") or match[1].startswith(RESERVED):
        raise bad_request(
            f"shared memory key {region.key!r} is not allowed: letters, digits, '_', '.' and '-', "
            f"not beginning with {RESERVED!r}"
        )
    try:
        descriptor = os.open(
            _OBJECTS / match[1], os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        )
    except OSError as error:
        raise bad_request(
            f"shared memory object {region.key!r} cannot be opened: {error.strerror}"
        ) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size < region.offset + region.byte_size:
        os.close(descriptor)
        raise bad_request(
            f"shared memory object {region.key!r} is shorter than {region.offset} + "
            f"{region.byte_size} bytes"
        )
    return descriptor
