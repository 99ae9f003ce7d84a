"""Compilation by numba. Compiled functions keep their types for mypy.

Compiled code holds no GIL and is cached on disk: only the first run of a checkout compiles. The
cache is numba's own (``NUMBA_CACHE_DIR``, beside the source, or in the home folder). If none of
these can be written, the cache is a private folder in the temporary directory. Caches hold code, so
a folder that other users can write is never used. Without a cache, every process compiles again.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import config, event
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., object])

# Of what is really compiled, and not read from a cache.
_TIMER: Any = event.TimingListener()  # type: ignore[no-untyped-call]
event.register("numba:compile", _TIMER)  # type: ignore[no-untyped-call]

_config: Any = config  # numba sets its attributes at import, so mypy does not know them


def compiled(function: F) -> F:
    return cast(F, _compile(function))


def compiled_with(*files: str) -> Callable[[F], F]:
    """Like ``compiled``, for a function that calls compiled functions of other ``files``.

    Numba's cache checks only the function's own file. Without this decorator it would keep code
    compiled from an old version of ``files``.
    """

    def decorate(function: F) -> F:
        dispatcher = _compile(function)
        if dispatcher.stats.cache_path is not None:
            digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
            index = dispatcher._cache._cache_file
            index._source_stamp = (index._source_stamp, digest)
        return cast(F, dispatcher)

    return decorate


def inlined(function: F) -> F:
    """A part of a compiled function, inlined into its callers.

    A helper that takes a dozen arrays and is not inlined spends most of its time counting
    references to them.
    """
    return cast(F, numba.njit(inline="always", error_model="numpy")(function))


def _call_c(
    typing_context: Any, address: Any, first: Any, second: Any, third: Any
) -> tuple[Any, Callable[..., Any]]:
    word = numba.types.uint64

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, *words = arguments
        kind = ir.FunctionType(ir.IntType(32), [ir.IntType(64)] * len(words))
        return builder.call(builder.inttoptr(at, kind.as_pointer()), words)

    return numba.types.int32(word, word, word, word), emit


# For compiled code: call the C function at an address with three words, and get its int. Unlike a
# ctypes function, an address can be passed to cached code. A C function with fewer parameters
# ignores the registers of the other words.
call_c: Callable[[Any, Any, Any, Any], int] = cast(Any, intrinsic)(_call_c)


def compiling_s() -> float:
    """What this process has spent on compiling so far."""
    return float(_TIMER.duration) if _TIMER.done else 0.0


def get_ready() -> None:
    """Fill numba's tables now. This takes 0.35 s in the first call of compiled code, cached or
    not."""
    compiled(_nothing)()


def _nothing() -> int:
    return 0


def _compile(function: Callable[..., object]) -> Any:
    # Reassociation lets sums use vector instructions; NaN and infinity keep their meaning.
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})(
        function
    )
    cache = _cache_of(function)
    if cache is not None:
        dispatcher._cache = cache  # as ``cache=True`` does
    return dispatcher


class _Cache(FunctionCache):
    """Numba's cache. A disk that is full or read-only, or an older cache, does not break it."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The cached code, or None. A cache of an older eclip may name classes that are gone; such
        a cache is flushed."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:
            with contextlib.suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
            return None

    @contextlib.contextmanager
    def _guard_against_spurious_io_errors(self) -> Iterator[None]:
        with contextlib.suppress(OSError):
            yield


def _cache_of(function: Callable[..., object]) -> _Cache | None:
    """A cache in the first folder that can be written; None without such a folder."""
    with contextlib.suppress(RuntimeError):  # numba found no place
        return _Cache(function)
    folder = _private_folder()
    if folder is None:
        return None
    given = _config.CACHE_DIR
    _config.CACHE_DIR = str(folder)  # read when a cache is made, and not again
    try:
        with contextlib.suppress(RuntimeError):
            return _Cache(function)
        return None
    finally:
        _config.CACHE_DIR = given


def _private_folder() -> Path | None:
    """Eclip's folder in the temporary directory; None if other users can write it."""
    try:
        root = Path(tempfile.gettempdir())
        if root == Path.cwd() and not root.stat().st_mode & stat.S_ISVTX:
            return None  # Python's last choice, the current directory, which is the user's own
        folder = root / f"eclip-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()  # not what a link points to
    except OSError:
        return None
    private = stat.S_ISDIR(found.st_mode) and not stat.S_IMODE(found.st_mode) & 0o077
    return folder if private and found.st_uid == os.geteuid() else None
