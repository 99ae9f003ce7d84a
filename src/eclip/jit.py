"""Compilation by numba. Compiled functions keep their types for mypy.

Compiled code holds no GIL and is cached on disk: only the first run of a checkout compiles. The
cache is numba's own (``NUMBA_CACHE_DIR``, beside the source, or in the home folder). If none of
these can be written, the cache is a private folder in the temporary directory. Caches hold code, so
a folder that other users can write is never used. Without a cache, every process compiles again.

A wheel and an image bring compiled code along (``SHIPPED``), so a new pod with an empty cache
compiles nothing. That code runs on any processor of its architecture. It counts only for the same
sources, the same versions of numba and Python; a cache comes first.
"""

import contextlib
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import config, event
from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache
from numba.core.compiler import CompileResult
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., object])

# Of what is really compiled, and not read from a cache.
_TIMER: Any = event.TimingListener()  # type: ignore[no-untyped-call]
event.register("numba:compile", _TIMER)  # type: ignore[no-untyped-call]

SHIPPED = Path(__file__).parent / "lib" / "compiled"  # of the package; there may be none
# For the process that compiles what is shipped: the folder to fill. Numba must be told to compile
# for every processor, by these variables.
FILL = "ECLIP_COMPILED"
EVERY_PROCESSOR = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}

_config: Any = config  # numba sets its attributes at import, so mypy does not know them


def compiled(function: F) -> F:
    return cast(F, _compile(function))


def compiled_with(*files: str) -> Callable[[F], F]:
    """Like ``compiled``, for a function that calls compiled functions of other ``files``.

    Numba's cache checks only the function's own file. Without this decorator it would keep code
    compiled from an old version of ``files``.
    """

    def decorate(function: F) -> F:
        return cast(F, _compile(function, *files))

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


def _swap_word(typing_context: Any, address: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("xchg", at, arguments[1], "acq_rel")

    return numba.types.int64(numba.types.uint64, numba.types.int64), emit


# For compiled code: put a word at an address that other threads swap, too, and get what it was.
swap_word: Callable[[Any, Any], int] = cast(Any, intrinsic)(_swap_word)


def compiling_s() -> float:
    """What this process has spent on compiling so far."""
    return float(_TIMER.duration) if _TIMER.done else 0.0


def _words_at(typing_context: Any, address: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
    word = numba.types.int64
    found = numba.types.Array(word, 1, "C")

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, size = arguments
        array = context.make_array(found)(context, builder)
        cast(Any, numba.np.arrayobj).populate_array(
            array,
            data=builder.inttoptr(at, array.data.type),
            shape=[size],
            strides=[context.get_constant(numba.types.intp, 8)],
            itemsize=context.get_constant(numba.types.intp, 8),
            meminfo=None,
        )
        return array._getvalue()

    return found(word, word), emit


def _load(typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(at, "acquire", 8)

    return numba.types.int64(numba.types.int64), emit


def _store(typing_context: Any, address: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], at, "release", 8)
        return context.get_dummy_value()

    return numba.types.void(numba.types.int64, numba.types.int64), emit


def _add(typing_context: Any, address: Any, value: Any) -> tuple[Any, Callable[..., Any]]:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", at, arguments[1], "acq_rel")

    return numba.types.int64(numba.types.int64, numba.types.int64), emit


# For compiled code, of words of memory at an address: as many of them as an array, which keeps
# nothing alive; read one that others write, and then what they wrote before it; write one, after
# all that was written before; add to one that others add to, and get what it was.
words_at: Callable[[Any, Any], Any] = cast(Any, intrinsic)(_words_at)
load_acquire: Callable[[Any], int] = cast(Any, intrinsic)(_load)
store_release: Callable[[Any, Any], None] = cast(Any, intrinsic)(_store)
fetch_add: Callable[[Any, Any], int] = cast(Any, intrinsic)(_add)


def get_ready() -> None:
    """Fill numba's tables now. This takes 0.35 s in the first call of compiled code, cached or
    not."""
    compiled(_nothing)()


def _nothing() -> int:
    return 0


def _compile(function: Callable[..., object], *files: str) -> Any:
    # Reassociation lets sums use vector instructions; NaN and infinity keep their meaning.
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "nsz"})(
        function
    )
    shipped = _Shipped(function, files)
    dispatcher._cache = _cache_of(function, files, shipped) or _Uncached(shipped)
    return dispatcher


def _digest(files: tuple[str, ...]) -> str:
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()


class _Shipped:
    """A function's code that came with the package."""

    def __init__(self, function: Callable[..., object], files: tuple[str, ...]) -> None:
        name = f"{function.__module__}.{function.__qualname__}"
        python = f"py{sys.version_info[0]}{sys.version_info[1]}"
        self._folder = Path(os.environ.get(FILL, SHIPPED))
        self._function, self._files = function, files
        self._name = f"{name}.{python}"

    def load(self, sig: Any, target_context: Any) -> Any:
        """The code, or None: there is none, or it is of other sources."""
        if not self._folder.is_dir():
            return None
        target_context.refresh()
        try:
            data = self._file.load(_key(sig, target_context.codegen()))  # type: ignore[no-untyped-call]
            if data is None:
                return None
            return CompileResult._rebuild(target_context, *data)  # type: ignore[no-untyped-call]
        except Exception:  # of another numba, or damaged: it is compiled again
            return None

    def save(self, sig: Any, data: Any) -> None:
        if FILL in os.environ:
            _, *processor = data.codegen.magic_tuple()
            if processor != [*EVERY_PROCESSOR.values()]:
                raise RuntimeError(f"compiled for {processor}, not for every processor")
            self._file.save(_key(sig, data.codegen), data._reduce())  # type: ignore[no-untyped-call]

    @property
    def _file(self) -> IndexDataCacheFile:
        sources = (str(self._function.__code__.co_filename), *self._files)
        stamp = _digest(sources)
        return IndexDataCacheFile(str(self._folder), self._name, stamp)  # type: ignore[no-untyped-call]


def _key(sig: Any, codegen: Any) -> tuple[Any, str]:
    return sig, codegen.magic_tuple()[0]  # the architecture, without the processor


class _Uncached(NullCache):
    """Where nothing can be written: what is shipped, and nothing else."""

    def __init__(self, shipped: _Shipped) -> None:
        self._shipped = shipped

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        return self._shipped.load(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        self._shipped.save(sig, data)


class _Cache(FunctionCache):
    """Numba's cache. A disk that is full or read-only, or an older cache, does not break it."""

    def __init__(
        self, function: Callable[..., object], files: tuple[str, ...], shipped: _Shipped
    ) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._shipped = shipped
        if files:
            index = self._cache_file
            index._source_stamp = (index._source_stamp, _digest(files))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The cached code, what is shipped, or None. A cache of an older eclip may name classes
        that are gone; such a cache is flushed."""
        try:
            found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:
            found = None
            with contextlib.suppress(OSError):
                self.flush()  # type: ignore[no-untyped-call]
        return found or self._shipped.load(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        self._shipped.save(sig, data)

    @contextlib.contextmanager
    def _guard_against_spurious_io_errors(self) -> Iterator[None]:
        with contextlib.suppress(OSError):
            yield


def _cache_of(
    function: Callable[..., object], files: tuple[str, ...], shipped: _Shipped
) -> _Cache | None:
    """A cache in the first folder that can be written; None without such a folder."""
    with contextlib.suppress(RuntimeError):  # numba found no place
        return _Cache(function, files, shipped)
    folder = _private_folder()
    if folder is None:
        return None
    given = _config.CACHE_DIR
    _config.CACHE_DIR = str(folder)  # read when a cache is made, and not again
    try:
        with contextlib.suppress(RuntimeError):
            return _Cache(function, files, shipped)
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
